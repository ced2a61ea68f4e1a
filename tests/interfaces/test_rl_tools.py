"""The ten tools in Python: what they refuse, what they tell, and that sessions are apart."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from palestra import agent_tools as rl_tools
from palestra.agent_tools import RlTools, check_rl_api_keys, check_rl_python_version, get_missing_keys, views
from palestra.agent_tools.tools import TOOLS
from palestra.runs.index import UnknownRun
from palestra.runs.locks import RequestLimits, Site
from palestra.runs.manager import Run, RunManager, RunRequest

sys.path.insert(0, str(Path(__file__).parent))
import rl_agent


@pytest.fixture
def folder(tmp_path, monkeypatch):
    rl_agent.make_site(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tools(folder):
    return RlTools(RunManager(folder / "home"), Site())


@pytest.fixture(scope="module")
def chosen(tmp_path_factory):
    """A session with the calculator selected, for tests that leave it as it was."""
    tools = RlTools(RunManager(tmp_path_factory.mktemp("home")), Site())
    tools.rl_select_environment("calculator")
    return tools


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


def edit(tools, field, value):
    return tools.call("rl_edit_config", {"field": field, "value": value})


def test_a_script_prepares_a_training_and_its_request_has_all_that_was_set(folder):
    manager = OneRun(folder / "home")
    tools = RlTools(manager, Site(maximum={"train.max_steps": 3}, run={"lora.r": 0}))

    async def call(tool, /, **arguments):
        answer = tools.call(tool, arguments)
        json.dumps(answer, allow_nan=False)
        return answer

    asyncio.run(rl_agent.prepare(call))
    answer = tools.rl_start_training()
    assert answer["status"] == "starting"
    (request,) = manager.requests
    assert request.environment.endswith("echo_number.py:Echo")
    assert request.env_settings == {"largest": 5}
    assert request.settings["train.max_steps"] == 1
    assert request.settings["lora.r"] == 0
    assert request.settings["track.run_name"] == answer["wandb_run_name"]


@pytest.mark.parametrize(
    ("field", "value", "read"),
    [
        ("operations", "5", 5),
        ("operations", 5.0, 5),
        ("run.seed", "7", 7),
        ("train.learning_rate", "1e-3", 0.001),
        ("train.learning_rate", 1, 1),
        ("train.max_steps", "null", None),
        ("train.filter_equal_groups", "False", False),
        ("track.project", "5", "5"),  # a text stays a text
        ("lora.target_modules", '["q_proj"]', ["q_proj"]),
    ],
)
def test_text_is_read_where_it_can_mean_one_thing_only(chosen, field, value, read):
    assert edit(chosen, field, value)["value"] == read


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("operations", "5x"),
        ("operations", 5.5),
        ("operations", True),
        ("operations", None),
        ("operations", [5]),
        ("operations", 0),
        ("operations", 9),
        ("train.filter_equal_groups", 1),
        ("train.learning_rate", float("nan")),
        ("train.learning_rate", "NaN"),
        ("train.learning_rate", "-1"),
        ("train.loss", "ppo"),
        ("rollout.group_size", 1),
        ("rollout.max_staleness", -1),
        ("track.report_to", ["postcards"]),
        ("track.project", "x" * 20_000),
    ],
)
def test_a_wrong_value_is_refused_and_changes_nothing(chosen, field, value):
    before = chosen.rl_get_current_config()
    answer = edit(chosen, field, value)
    assert "error" in answer
    assert chosen.rl_get_current_config() == before


def test_locked_settings_are_refused_under_every_name_they_have(folder):
    tools = RlTools(RunManager(folder / "home"), Site(profile="tinker"))
    tools.rl_select_environment("calculator")
    for field, value in {
        "trainer.learning_rate": 4e-5,
        "learning_rate": 4e-5,
        "train.learning_rate": 4e-5,
        "model.name": "Qwen/Qwen3-8B",
        "total_steps": 2500,
        "train.max_steps": 2500,
    }.items():
        answer = edit(tools, field, 1)
        assert answer["locked_value"] == value, field
    assert "output_dir" not in {f["name"] for f in tools.rl_get_current_config()["configurable_fields"]}
    assert "error" in edit(tools, "output_dir", "/etc")


def test_two_clients_edit_without_seeing_each_others(folder):
    manager = RunManager(folder / "home")
    one, other = RlTools(manager, Site()), RlTools(manager, Site())
    for tools, value in ((one, 3), (other, 4)):
        tools.rl_select_environment("calculator")
        edit(tools, "operations", value)
    shown = [
        {f["name"]: f["current_value"] for f in tools.rl_get_current_config()["configurable_fields"]}["operations"]
        for tools in (one, other)
    ]
    assert shown == [3, 4]


def test_status_is_told_once_in_a_while_and_at_once_when_the_state_changes(folder):
    now = [0.0]
    manager = OneRun(folder / "home")
    tools = RlTools(manager, Site(limits=RequestLimits(status_check_minutes=30)), clock=lambda: now[0])
    look = lambda: tools.rl_check_status("abcd2345")  # noqa: E731
    assert look()["metrics"]["reward_mean"] is None  # NaN is no JSON
    assert look()["rate_limited"]
    assert look()["minutes_to_wait"] == 30
    manager.run = replace(manager.run, state="failed", reason="the trainer ended with 1: out of memory")
    assert look()["error"] == "the trainer ended with 1: out of memory"
    manager.run = replace(manager.run, state="running", reason=None)
    assert "metrics" in look()
    now[0] += 29 * 60
    assert look()["rate_limited"]
    now[0] += 61
    assert "metrics" in look()


def test_status_and_results_say_why_nothing_is_learned(folder):
    manager = OneRun(folder / "home")
    run = manager.run = replace(manager.run, folder=folder / "run", state="running")
    run.folder.mkdir()
    row = {"rollouts": 8, "rollout_failures": 0, "equal_reward_groups": 1.0, "reward_min": 0.0, "reward_max": 0.0}
    (run.folder / "metrics.jsonl").write_text("".join(json.dumps(row | {"step": i}) + "\n" for i in range(4)))
    (sentence,) = RlTools(manager, Site()).rl_check_status(run.run_id)["findings"]
    assert "in the last 4 steps every rollout earned a reward of 0" in sentence
    manager.run = replace(run, state="completed")
    (sentence,) = views.results(manager.run, {})["findings"]
    assert "in 4 of 4 steps" in sentence
    assert views.results(manager.run, {})["capability"] is None
    (run.folder / "run.json").write_text(json.dumps({"capability": {"text": "2 calls per attempt"}}))
    assert views.results(manager.run, {})["capability"] == "2 calls per attempt"
    (run.folder / "report.json").write_text(json.dumps({"findings": [{"kind": "x", "sentence": "It loops."}]}))
    assert views.results(manager.run, {})["findings"] == ["It loops."]


def test_an_unknown_run_is_an_error_however_often_it_is_asked_for(tools):
    for run_id in ("zzzzzzzz", "zzzzzzzz", "../../etc/passwd", "", "x" * 10_000, "'; drop table runs"):
        answer = tools.call("rl_check_status", {"run_id": run_id})
        assert "no run" in answer["error"]
        assert "rate_limited" not in answer


def test_never_started_processes_are_told_so(folder):
    tools = RlTools(OneRun(folder / "home"), Site())
    assert set(tools.rl_check_status("abcd2345")["processes"].values()) == {"not started"}


def test_an_environment_whose_config_fails_is_an_answer(folder, tools):
    path = folder / "environments" / "echo_number.py"
    path.write_text(rl_agent.ENVIRONMENT.replace("largest=7", "largest=700"))
    assert "less than or equal to 99" in tools.rl_select_environment("echo-number")["error"]
    path.write_text(rl_agent.ENVIRONMENT.replace("import os", "import os; os._exit(3)"))
    assert "cannot be read" in tools.rl_select_environment("echo-number")["error"]


def test_keys_are_asked_for_by_name_and_by_need(folder, monkeypatch):
    for key in ("TINKER_API_KEY", "WANDB_API_KEY"):
        monkeypatch.delenv(key, raising=False)
    assert check_rl_python_version()
    assert check_rl_api_keys("local")
    assert get_missing_keys("tinker", ["wandb"]) == ["TINKER_API_KEY", "WANDB_API_KEY"]
    tools = RlTools(OneRun(folder / "home"), Site(profile="tinker"))
    tools.rl_select_environment("calculator")
    assert tools.rl_start_training()["missing"] == ["TINKER_API_KEY", "WANDB_API_KEY"]
    monkeypatch.setenv("TINKER_API_KEY", "tk-0123456789")
    monkeypatch.setenv("WANDB_API_KEY", "wk-0123456789")
    answer = json.dumps(tools.rl_start_training())
    assert "tk-0123456789" not in answer
    assert "wk-0123456789" not in answer


def test_a_secret_is_neither_taken_nor_told(folder, monkeypatch):
    tools = RlTools(OneRun(folder / "home"), Site())
    tools.rl_select_environment("calculator")
    monkeypatch.setenv("MY_API_KEY", rl_agent.PLANTED)
    assert "hold a secret" in edit(tools, "track.project", f"use {rl_agent.PLANTED}")["error"]
    failed = replace(tools.manager.run, state="failed", reason=f"401 for {rl_agent.PLANTED}")
    tools.manager.run = failed
    assert tools.rl_check_status("abcd2345")["error"] == "401 for [MY_API_KEY]"


def test_the_python_functions_are_the_tools_over_one_session(folder, monkeypatch):
    monkeypatch.setenv("PALESTRA_HOME", str(folder / "home"))
    rl_tools.this_session.cache_clear()
    assert "error" in rl_tools.rl_get_current_config()
    assert rl_tools.rl_select_environment("calculator")["environment"] == "calculator"
    assert rl_tools.rl_edit_config("operations", 3)["value"] == 3
    assert rl_tools.rl_list_runs() == {"runs": [], "count": 0}
    rl_tools.this_session.cache_clear()


def test_every_tool_has_a_schema_that_function_calling_takes():
    for row in rl_tools.tool_schemas():
        function = row["function"]
        assert row["type"] == "function"
        assert function["description"]
        assert function["parameters"]["type"] == "object"
        assert all("description" in p for p in function["parameters"]["properties"].values()), function["name"]
    assert [row["function"]["name"] for row in rl_tools.tool_schemas()] == list(rl_tools.TOOL_NAMES)


def test_the_schemas_are_the_published_ones_byte_for_byte(cli):
    published = Path(__file__).with_name("rl_tool_schemas.json").read_text(encoding="utf-8")
    assert cli("tools", "schema").out == published


def test_the_python_functions_have_the_signatures_of_the_schemas():
    for name, tool in TOOLS.items():
        function = getattr(rl_tools, name)
        assert list(inspect.signature(function).parameters) == list(tool.parameters["properties"])
        assert inspect.getdoc(function).splitlines()[0] == tool.description.splitlines()[0]


ATROPOS = '''
from atroposlib.envs.base import BaseEnv, BaseEnvConfig


class Gsm(BaseEnv):
    """Grade-school sums."""

    name = "gsm"
    env_config_cls = BaseEnvConfig

    @classmethod
    def config_init(cls):
        return BaseEnvConfig(group_size=12), []
'''

ATROPOSLIB = """
from pydantic import BaseModel


class BaseEnvConfig(BaseModel):
    group_size: int = 4
    total_steps: int = 1000
    max_num_workers: int = -1
    wandb_name: str | None = None


class BaseEnv:
    pass
"""


def test_an_atropos_environment_is_set_up_in_the_python_that_can_import_it(folder, monkeypatch):
    (folder / "environments" / "gsm.py").write_text(ATROPOS)
    monkeypatch.delenv("PALESTRA_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    manager = OneRun(folder / "home")
    tools = RlTools(manager, Site())
    assert "palestra env run-atropos" in tools.rl_select_environment("gsm")["error"]  # its library is not there

    library = folder / "library" / "atroposlib" / "envs"
    library.mkdir(parents=True)
    (library / "base.py").write_text(ATROPOSLIB)
    python = folder / "cache" / "palestra" / f"atropos-0.4.0-py3.{sys.version_info.minor}" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder / "library"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    chosen = tools.rl_select_environment("gsm")
    config = tools.rl_get_current_config()
    open_fields = {f["name"]: f["current_value"] for f in config["configurable_fields"]}
    assert open_fields["group_size"] == 12
    assert open_fields["wandb_name"] == chosen["wandb_name"]
    assert "max_num_workers" not in open_fields
    assert edit(tools, "max_num_workers", 4000)["locked_value"] < 4000
    assert "rollout.group_size" not in open_fields  # one setting, one name
    edit(tools, "total_steps", 2)
    assert tools.rl_start_training()["status"] == "starting"
    (request,) = manager.requests
    assert request.env_settings["max_num_workers"] < 4000
    assert request.env_settings["wandb_name"] == request.settings["track.run_name"]
    assert (request.settings["train.max_steps"], request.settings["rollout.group_size"]) == (2, 12)
    assert request.server_settings["server_type"] == "sglang"
    held = RlTools(manager, Site(run={"rollout.group_size": 6}))
    held.rl_select_environment("gsm")
    assert edit(held, "group_size", 8)["locked_value"] == 6
    held.rl_start_training()
    assert manager.requests[-1].env_settings["group_size"] == manager.requests[-1].settings["rollout.group_size"] == 6
    assert "asks its model over HTTP" in tools.rl_test_inference(models=["palestra/tiny"])["error"]

    open_site = RlTools(manager, Site(unlock=["server.timeout"]))
    open_site.rl_select_environment("gsm")
    assert edit(open_site, "server.timeout", 90)["value"] == 90
    assert "error" in edit(open_site, "server.timeout", 0)
    open_site.rl_start_training()
    assert manager.requests[-1].server_settings["timeout"] == 90
    assert "timeout" not in manager.requests[-1].env_settings
    assert edit(tools, "server.timeout", 90)["locked_value"] == 3600
    assert "server.weight" not in {lock["name"] for lock in config["locked_fields"]}  # nothing reads it
