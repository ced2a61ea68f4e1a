"""A script that plays an agent, the same through Python, MCP and HTTP, and run managers that start no process."""

import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from palestra.core.run_folder import RunFolder
from palestra.envs.discover import LIBRARY, in_file
from palestra.envs.load import EnvDescription
from palestra.extras.agent_tools.pending_run import PendingRunConfig
from palestra.models.loading import load_model
from palestra.runs.index import UnknownRun
from palestra.runs.locks import Site
from palestra.runs.manager import Run, RunManager, RunRequest

PALESTRA = [sys.executable, "-c", "from palestra.cli.main import main; main()"]
PLANTED = "sk-planted-0123456789"
Call = Callable[..., Awaitable[dict[str, Any]]]

ENVIRONMENT = '''
import os
from pydantic import Field
from palestra import Env, EnvConfig

print("said while it is imported")


class Config(EnvConfig):
    largest: int = Field(9, ge=1, le=99, description="the largest number")


class Echo(Env):
    """Say a number again."""

    name = "echo-number"
    env_config_cls = Config
    run_settings = {"rollout.max_new_tokens": 12, "train.problems_per_step": 2, "rollout.group_size": 2}

    @classmethod
    def config_init(cls):
        return Config(largest=7, train_size=8, held_out_size=2)

    def make_problem(self, rng):
        number = rng.randint(1, self.config.largest)
        return f"Say {number}.", number

    def score(self, answer):
        return 0.1 + 0.9 * (answer.strip() == str(self.problem.expect))
'''


class NothingStarts(RunManager):
    """The real manager, index and folders; the processes of its runs are never launched."""

    def _launch(self, run_id: str, folder: RunFolder) -> None:
        folder.logs.mkdir(exist_ok=True)


class OneRun(RunManager):
    """A manager whose one run is in the state that the test says; nothing is started."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.requests: list[RunRequest] = []
        self.run = Run(
            run_id="abcd2345", name="n", environment="e", state="starting", reason=None, folder=home, created=0.0,
            started=0.0, ended=None, processes={}, logs={}, ports={}, progress={"reward_mean": float("nan")},
        )  # fmt: skip

    def start(self, request: RunRequest, *, max_active: int | None = None) -> Run:
        request.check()
        self.requests.append(request)
        return self.run

    def get(self, run_id: str) -> Run:
        if run_id != self.run.run_id:
            raise UnknownRun(f"there is no run {run_id!r}")
        return self.run

    def page(self, limit: int | None, offset: int = 0) -> tuple[list[Run], int]:
        return [self.run], 1


def pending(site: Site = Site(), **field: object) -> PendingRunConfig:  # noqa: B008
    """The built-in calculator, selected without asking a process for its settings."""
    (found,) = in_file(LIBRARY / "calculator.py")
    row = {"name": "operations", "type": "int", "default": 1, "description": "", "schema": {"type": "integer"}}
    return PendingRunConfig.of(found, EnvDescription([{**row, **field}], {}), site)


def make_site(folder: Path) -> None:
    """A folder with an environment of its own, a file that does not parse, and a site file."""
    (folder / "environments").mkdir()
    (folder / "environments" / "echo_number.py").write_text(ENVIRONMENT)
    (folder / "environments" / "broken.py").write_text("class")
    (folder / "palestra.yaml").write_text("maximum: {train.max_steps: 3}\nrun: {lora.r: 0}\n")


def server_environment(folder: Path) -> dict[str, str]:
    return os.environ | {
        "PALESTRA_HOME": str(folder / "home"),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "MY_API_KEY": PLANTED,
    }


async def prepare(call: Call) -> None:
    """List, select and edit, also wrongly."""
    listed = await call("rl_list_environments")
    assert listed["count"] >= len(listed["environments"]) > 5
    assert "echo-number" in {env["name"] for env in listed["environments"]}
    assert any("broken.py" in path for path in listed["errors"])
    assert "error" in await call("rl_get_current_config")  # nothing is selected yet
    wrong = await call("rl_select_environment", name="echo-numbers")
    assert "Did you mean 'echo-number'?" in wrong["error"]
    assert "echo-number" in wrong["available"]
    chosen = await call("rl_select_environment", name="echo-number")
    assert chosen["wandb_name"].startswith("echo-number-20")
    config = await call("rl_get_current_config")
    fields = {field["name"]: field for field in config["configurable_fields"]}
    assert fields["largest"]["current_value"] == 7  # the environment's own, not the class default
    assert fields["rollout.max_new_tokens"]["current_value"] == 12
    assert fields["train.max_steps"]["current_value"] == 3  # the most that the site allows
    assert "trainer.checkpoint_dir" in {field["name"] for field in config["locked_fields"]}
    for field, value, key in (
        ("largest", "many", "expected_type"),
        ("largest", 100, "expected_type"),
        ("largest", True, "expected_type"),
        ("train.max_steps", 4, "maximum"),
        ("output_dir", "/etc", "locked_value"),
        ("lora.r", 8, "locked_value"),
        ("no_such_field", 1, "available_fields"),
    ):
        refused = await call("rl_edit_config", field=field, value=value)
        assert "error" in refused, (field, value)
        assert key in refused, (field, value)
    edited = await call("rl_edit_config", field="largest", value="5")
    assert edited["value"] == edited["config"]["largest"] == 5
    assert (await call("rl_edit_config", field="train.max_steps", value=1))["value"] == 1


async def wait_for_end(call: Call, run_id: str, limit_s: float = 300.0) -> dict[str, Any]:
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        status = await call("rl_check_status", run_id=run_id)
        if status["status"] in ("completed", "failed", "stopped"):
            return status
        await asyncio.sleep(0.5)
    raise AssertionError(f"{run_id} did not end in {limit_s} s: {status}")


async def check_results(call: Call, run_id: str) -> dict[str, Any]:
    """The run has ended well, and its weights load."""
    status = await wait_for_end(call, run_id)
    assert status["status"] == "completed", status
    assert status["metrics"]["step"] == 1
    assert status["metrics"]["reward_mean"] is not None
    assert status["processes"]["trainer"] == "exited (0)"
    assert status["processes"]["api"] == "in the trainer's process"
    assert status["environment"] == "echo-number"
    assert status["wandb_run_name"].startswith("echo-number-20")
    results = await call("rl_get_results", run_id=run_id)
    assert results["final_metrics"]["step"] == 1
    assert results["history"]
    assert load_model(results["weights_path"]).tokenizer is not None
    assert run_id in {run["run_id"] for run in (await call("rl_list_runs"))["runs"]}
    return results


def assert_no_secret_below(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            assert PLANTED.encode() not in path.read_bytes(), path
