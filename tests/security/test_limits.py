"""Limits hold, also when many ask at once, and whatever an environment asks for."""

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from annotated_types import Le, Lt
from builders import wait_until
from pydantic.fields import FieldInfo

from palestra.core.config import RunConfig
from palestra.core.errors import ResourceError, SettingError
from palestra.core.http import Request
from palestra.envs.discover import LIBRARY, env_class, in_file
from palestra.envs.env import EnvConfig
from palestra.extras.adapters.by_name import BY_NAME
from palestra.extras.agent_tools import RlTools, config_fields, mcp_server
from palestra.extras.agent_tools.clients import Clients
from palestra.extras.agent_tools.inference import Candidate, Relay
from palestra.extras.agent_tools.locks import RequestLimits, Site, locked_settings
from palestra.runs.index import TooManyRuns
from palestra.runs.manager import RunManager, RunRequest

sys.path.insert(0, str(Path(__file__).parents[1] / "interfaces"))
import yaml
from rl_agent import NothingStarts, pending
from starlette.testclient import TestClient

from palestra.extras.atropos import atropos


def test_of_eight_clients_that_start_at_once_exactly_the_limit_gets_a_run(tmp_path):
    barrier = threading.Barrier(8)

    def start(_: int) -> str | None:
        manager = NothingStarts(tmp_path / "home")
        barrier.wait()
        try:
            return manager.start(RunRequest(), max_active=2).run_id
        except TooManyRuns:
            return None

    with ThreadPoolExecutor(8) as pool:
        ids = [run_id for run_id in pool.map(start, range(8)) if run_id]
    assert len(ids) == 2
    assert len(list((tmp_path / "home" / "runs").iterdir())) == 2  # the others left no folder


def test_the_tool_says_how_many_runs_there_may_be(tmp_path, monkeypatch):
    monkeypatch.setattr("palestra.extras.agent_tools.tools.describe", lambda *_: None)
    tools = RlTools(NothingStarts(tmp_path / "home"), Site(limits=RequestLimits(active_runs=1)))
    tools._pending = pending(tools.site)
    assert "run_id" in tools.rl_start_training()
    assert "of at most 1" in tools.rl_start_training()["error"]


COEFFICIENTS = {
    "train.learning_rate", "train.epsilon", "train.epsilon_high", "train.delta", "train.sapo_temperature_pos",
    "train.sapo_temperature_neg", "train.beta", "train.importance_cap", "train.off_policy_mask_threshold",
    "train.entropy_coefficient", "train.target_entropy", "train.max_grad_norm", "train.weight_decay",
    "rollout.temperature", "rollout.repetition_penalty", "echo.coefficient", "echo.final_coefficient",
    "eval.temperature", "stages.sft_learning_rate",
}  # fmt: skip


def has_upper_bound(info: FieldInfo) -> bool:
    return any(isinstance(limit, Le | Lt) for limit in info.metadata)


def is_number(info: FieldInfo) -> bool:
    return bool({int, float} & {info.annotation, *get_args(info.annotation)})


def test_every_number_of_a_run_has_a_bound_or_is_a_coefficient_that_costs_nothing():
    numbers = {key: info for key, info in RunConfig.settings().items() if is_number(info)}
    assert numbers.keys() >= COEFFICIENTS
    without = {key for key, info in numbers.items() if not has_upper_bound(info)}
    assert without <= COEFFICIENTS, "give a new number a bound (le=), or list it as a coefficient"


def test_every_number_of_a_built_in_environment_has_a_bound():
    found = [env_class(env) for path in sorted(LIBRARY.glob("[a-z]*.py")) for env in in_file(path)]
    assert len(found) >= 5
    assert {"train_size", "held_out_size"} <= EnvConfig.model_fields.keys(), "how many problems there are"
    for config in [EnvConfig, *(cls.env_config_cls for cls in (*found, *BY_NAME.values()))]:
        without = {name for name, info in config.model_fields.items() if is_number(info) and not has_upper_bound(info)}
        assert without <= {"seed"}, config


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("checkpoint.keep_last", 10**9), ("lora.r", 10**6), ("rollout.max_open_episodes", 10**7),
        ("rollout.max_tool_result_chars", 10**12), ("model.threads", 10**6), ("eval.cases", 10**9),
        ("rollout.tool_timeout_s", 1e12), ("train.epochs", 10**9), ("train.max_steps", 10**9),
        ("train.problems_per_step", 10**9), ("train.iterations", 10**9), ("train.minibatches", 10**9),
        ("train.refill_limit", 10**9), ("rollout.group_size", 10**9), ("rollout.max_new_tokens", 10**9),
        ("rollout.max_tool_rounds", 10**9), ("eval.samples_per_case", 10**9),
    ],
)  # fmt: skip
def test_a_number_that_multiplies_work_has_a_bound(key, value):
    with pytest.raises(SettingError, match=key):
        RunConfig.build({key: value})


def test_an_agent_keeps_a_bounded_number_of_checkpoints_unless_the_site_allows_more(agent):
    assert agent(Site()).rl_edit_config("checkpoint.keep_last", 21)["maximum"] == 20
    site = Site(maximum={"checkpoint.keep_last": 500})
    assert agent(site).rl_edit_config("checkpoint.keep_last", 500)["value"] == 500


def test_only_a_few_environments_are_read_at_once_and_one_that_waits_too_long_is_told_so(monkeypatch):
    reading, most = 0, 0
    lock = threading.Lock()

    def slow(*_):
        nonlocal reading, most
        with lock:
            reading += 1
            most = max(most, reading)
        time.sleep(0.01)
        with lock:
            reading -= 1
        return {"fields": [], "run_settings": {}}

    child = SimpleNamespace(ask=lambda *_, **__: slow(), close=lambda: None)
    monkeypatch.setattr(config_fields, "ChildProcess", lambda *_: child)
    found = in_file(LIBRARY / "calculator.py")[0]
    with ThreadPoolExecutor(30) as pool:
        list(pool.map(lambda _: config_fields.describe(found), range(30)))
    assert most == 4
    monkeypatch.setattr(config_fields, "_DESCRIBED_AT_ONCE", threading.BoundedSemaphore(1))
    monkeypatch.setattr(config_fields, "_DESCRIBE_WAIT_S", 0.01)
    config_fields._DESCRIBED_AT_ONCE.acquire()
    with pytest.raises(ResourceError, match="ask again in a minute"):
        config_fields.describe(found)


def test_sessions_over_mcp_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(mcp_server, "MAX_SESSIONS", 2)
    monkeypatch.setattr(mcp_server, "_SESSION_IDLE_S", 0.5)
    manager = RunManager(tmp_path / "home")
    clients = Clients(lambda: RlTools(manager, Site()))
    about = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
    question = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": about}
    headers = {"Accept": "application/json, text/event-stream"}
    with TestClient(mcp_server.http_app(clients, None), base_url="http://127.0.0.1:8002") as client:

        def begin() -> int:
            return client.post("/mcp", json=question, headers=headers).status_code

        assert [begin() for _ in range(3)] == [200, 200, 503]
        wait_until(lambda: begin() == 200)  # idle sessions have ended


@pytest.fixture
def relay(monkeypatch):
    """A relay to a model that needs no network; `posted` has what would have been sent."""
    relay = Relay(Candidate("m", "m", "http://127.0.0.1:9/v1"), 5.0, max_completions=4)
    posted: list[dict] = []

    def post(request):
        posted.append(request)
        return 200, b'{"usage": {"completion_tokens": 1}}'

    monkeypatch.setattr(relay, "_post", post)
    with relay.running():
        yield relay, posted


def ask(relay: Relay, body: object, token: str | None = None) -> int:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = f"{relay.url}/chat/completions"
    return Request(url, data, token=relay.token if token is None else token).send().status


def test_the_relay_asks_for_the_tested_model_only(relay):
    server, posted = relay
    assert ask(server, {"model": "m"}) == 200
    assert ask(server, {"model": "a/dearer-one"}) == 403
    assert ask(server, {"model": "m"}, token="another") == 401
    assert [ask(server, body) for body in ([1], b"{", b"[" * 100_000, {})] == [403] * 4
    assert posted == [{"model": "m"}]


def test_the_relay_asks_for_no_more_completions_than_the_test_may_have(relay):
    server, posted = relay
    statuses = {3: 200, 2: 403, 10**9: 403, -1: 403, "9": 403, 1: 200}
    assert {n: ask(server, {"model": "m", "n": n}) for n in statuses} == statuses
    assert ask(server, {"model": "m", "n": 1}) == 403
    assert sum(request["n"] for request in posted) == 4


def test_an_atropos_environment_gets_its_token_in_a_private_file(tmp_path, monkeypatch):
    class Replaced(Exception):
        pass

    def execve(program, words, environ):
        raise Replaced(words, environ)

    monkeypatch.setenv("PALESTRA_RELAY_TOKEN", "relay-0123456789")
    monkeypatch.setattr(atropos.AtroposEnv, "python", lambda *_: Path("/venv/bin/python"))
    monkeypatch.setattr(atropos, "cached_tokenizer", lambda *_: Path("/cache/tokenizer"))
    monkeypatch.setattr(atropos.os, "execve", execve)
    openai = {"model_name": "m", "base_url": "http://127.0.0.1:1/0/v1", "api_key_env": "PALESTRA_RELAY_TOKEN"}
    out = tmp_path / "out.jsonl"
    with pytest.raises(Replaced) as replaced:
        atropos.AtroposEnv(Path("gsm.py"), {"level": 2, "group_size": 3}, openai).process(RunConfig(), 5, out)
    words, environ = replaced.value.args
    assert "relay-0123456789" not in "".join([*words, *environ.values()])
    file = Path(words[-1])
    assert file.stat().st_mode & 0o777 == 0o600
    written = yaml.safe_load(file.read_text())
    assert written["openai"]["api_key"] == "relay-0123456789"
    assert written["env"] | {"total_steps": 5, "group_size": 3, "level": 2, "use_wandb": False} == written["env"]
    assert written["env"]["data_path_to_save_groups"] == str(out)
    with pytest.raises(SettingError, match="say where: --openai"):
        atropos.AtroposEnv(Path("gsm.py"), {}, {}).process(RunConfig(), 5, out)


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """An agent's tools with an environment selected; no run is launched."""
    monkeypatch.setattr("palestra.extras.agent_tools.tools.describe", lambda *_: None)

    def make(site: Site) -> RlTools:
        tools = RlTools(NothingStarts(tmp_path / "home"), site)
        tools._pending = pending(site)
        return tools

    return make


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("backend", "tinker"),
        ("backend", "ray"),
        ("tinker.base_url", "http://127.0.0.1:18666"),
        ("vllm.mode", "server"),
        ("vllm.url", "http://127.0.0.1:18666"),
        ("rollout.policy_url", "http://127.0.0.1:18666"),
        ("rollout.weights_folder", "/any/folder"),
        ("output_dir", "/any/folder"),
        ("ray.address", "evil:1"),
        ("track.entity", "other"),
    ],
)
def test_an_agent_cannot_change_where_keys_weights_and_data_go(agent, field, value):
    tools = agent(Site())
    assert "locked_value" in tools.rl_edit_config(field, value)
    assert "run_id" in tools.rl_start_training()
    saved = next((tools.manager.home / "runs").rglob("request.json")).read_text()
    assert field not in json.loads(saved)["settings"]


@pytest.mark.parametrize("path", ["/any/path", "../model", "~/model", ".", "a/b/c", "weights.gguf"])
def test_an_agent_names_models_of_the_hub_and_no_paths(agent, path):
    tools = agent(Site())
    assert "hub" in tools.rl_edit_config("model.name", path)["error"]
    assert "error" in tools.rl_test_inference(1, 2, [f"local:{path}"])
    assert tools.rl_edit_config("model.name", "Qwen/Qwen3-0.6B")["value"] == "Qwen/Qwen3-0.6B"
    assert agent(Site(unlock=["model.name"])).rl_edit_config("model.name", path)["value"] == path


def test_an_unlocked_address_gets_no_key_of_the_server(agent, monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", "tml-server-secret-77777777")
    tools = agent(Site(unlock=["backend", "tinker.base_url"]))
    tools.rl_edit_config("backend", "tinker")
    tools.rl_edit_config("tinker.base_url", "http://127.0.0.1:18666")
    assert "TINKER_API_KEY" in tools.rl_start_training()["error"]
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:18666")
    assert "run_id" in tools.rl_start_training()


def test_an_unlocked_endpoint_of_an_agent_gets_no_key_of_the_server(agent, monkeypatch):
    monkeypatch.setenv("PALESTRA_ROLE_KEY_CRITIC", "role-server-secret-77777777")
    tools = agent(Site(unlock=["agent.roles"]))
    assert "error" not in tools.rl_edit_config("agent.roles", {"critic": "http://127.0.0.1:18666/v1"})
    assert "PALESTRA_ROLE_KEY_CRITIC" in tools.rl_start_training()["error"]


def test_a_lock_that_has_no_effect_is_not_shown(agent):
    """The profile `tinker` lists a limit of the local trainer's memory, which a Tinker server does not read."""
    tools = agent(Site(profile="tinker"))
    shown = {lock["name"]: lock["locked_value"] for lock in tools.rl_get_current_config()["locked_fields"]}
    assert shown["backend"] == "tinker"
    assert "trainer.max_token_trainer_length" not in shown
    request = tools.pending.request()
    for key, value in locked_settings(list(tools.pending.locks)).items():
        assert request.run_settings[key] == value
