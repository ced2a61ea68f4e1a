"""The ten tools in Python: what they refuse, what they answer, under which names, and that sessions are separate."""

import asyncio
import inspect
import json
import sys
import sysconfig
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from palestra import agent_tools as rl_tools
from palestra.core.errors import SettingError
from palestra.core.files import write_json, write_text
from palestra.envs.discover import in_file
from palestra.extras.agent_tools import RlTools, coroutines, get_missing_keys
from palestra.extras.agent_tools.answers import Refusal
from palestra.extras.agent_tools.config_fields import EnvDescription
from palestra.extras.agent_tools.inference import OPENROUTER_MODELS, Candidate, _scores, _summary
from palestra.extras.agent_tools.locks import RequestLimits, Site
from palestra.extras.agent_tools.pending_run import PendingRunConfig
from palestra.extras.agent_tools.tools import TOOLS
from palestra.extras.atropos.atropos import PACKAGES, env_process_environment
from palestra.policy.openai import OpenAISettings
from palestra.runs.index import Index
from palestra.runs.manager import RunManager, RunRequest
from palestra.runs.request import process_environment

sys.path.insert(0, str(Path(__file__).parent))
import rl_agent
from rl_agent import NothingStarts, OneRun, pending


@pytest.fixture
def folder(tmp_path, monkeypatch):
    rl_agent.make_site(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tools(folder):
    return RlTools(NothingStarts(folder / "home"), Site())


@pytest.fixture(scope="module")
def chosen(tmp_path_factory):
    """A session with the calculator selected, for tests that leave it as it was."""
    tools = RlTools(RunManager(tmp_path_factory.mktemp("home")), Site())
    tools.rl_select_environment("calculator")
    return tools


@pytest.fixture
def started(tools, monkeypatch):
    """A session with one run, and the answer to its start."""
    monkeypatch.setattr("palestra.extras.agent_tools.tools.describe", lambda *_: None)
    tools._pending = pending()
    return tools, tools.rl_start_training()


def edit(tools, field, value):
    return tools.call("rl_edit_config", {"field": field, "value": value})


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
        ("wandb_name", "5", "5"),  # a text stays a text
        ("lora.target_modules", '["q_proj"]', ["q_proj"]),
    ],
)
def test_text_is_read_where_it_can_mean_one_thing_only(chosen, field, value, read):
    assert edit(chosen, field, value)["value"] == read


WRONG = [
    ("operations", "5x"), ("operations", 5.5), ("operations", True), ("operations", None), ("operations", [5]),
    ("operations", 0), ("operations", 9), ("train.filter_equal_groups", 1), ("train.learning_rate", float("nan")),
    ("train.learning_rate", "NaN"), ("train.learning_rate", "-1"), ("train.loss", "ppo"), ("rollout.group_size", 1),
    ("rollout.max_staleness", -1), ("track.report_to", ["postcards"]), ("wandb_name", "x" * 20_000),
]  # fmt: skip


def test_a_wrong_value_is_refused_and_changes_nothing(chosen):
    before = chosen.rl_get_current_config()
    for field, value in WRONG:
        assert "error" in edit(chosen, field, value), (field, value)
    assert chosen.rl_get_current_config() == before


@pytest.mark.parametrize("field", ["agent.sandbox", "track.project", "wandb_project"])
def test_the_programs_sandbox_and_the_project_of_trackers_are_locked(chosen, field):
    assert "locked" in edit(chosen, field, "true")["error"]


@pytest.mark.parametrize(
    ("name", "value", "key", "read"),
    [
        ("group_size", 8, "rollout.group_size", 8),
        ("total_steps", "20", "train.max_steps", 20),
        ("batch_size", 16, "train.problems_per_step", 4),  # attempts there, problems here; groups of 4
        ("learning_rate", 1e-4, "train.learning_rate", 1e-4),
        ("lora_rank", 8, "lora.r", 8),
        ("use_wandb", True, "track.report_to", ["wandb"]),
    ],
)
def test_short_names_of_other_trainers_are_taken(tools, name, value, key, read):
    tools._pending = pending().edit("rollout.group_size", 4)
    answer = tools.rl_edit_config(name, value)
    assert (answer["field"], answer["value"]) == (key, read)
    assert tools.pending.settings()[key] == read


def test_a_short_name_may_be_locked_the_environments_own_or_no_whole_number_of_groups(tools):
    assert pending(name="group_size").edit("group_size", 9).env_settings() == {"group_size": 9}
    for prepared, name, value, key, expected in (
        (pending(Site(run={"rollout.group_size": 6})), "group_size", 8, "locked_value", 6),
        (pending(), "batch_size", 16, "field", "batch_size"),  # needs a group size first
        (pending().edit("rollout.group_size", 4), "batch_size", 10, "field", "batch_size"),
    ):
        tools._pending = prepared
        answer = tools.rl_edit_config(name, value)
        assert "rollout.group_size" in answer["error"] or "locked" in answer["error"]
        assert answer[key] == expected


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
        assert edit(tools, field, 1)["locked_value"] == value, field
    assert "output_dir" not in {f["name"] for f in tools.rl_get_current_config()["configurable_fields"]}
    assert "error" in edit(tools, "output_dir", "/etc")


def test_every_lock_that_is_shown_locks_something():
    """An environment of ours reads no setting of a server, and none that it does not have."""
    shown = {lock.full_name for lock in pending().shown_locks()}
    others = {"stages.traces", "stages.teacher", "distill.teacher", "distill.teacher_url", "agent.roles"}
    others |= {"train.custom_loss", "train.custom_advantages", "agent.sandbox"}
    assert shown == {"trainer.checkpoint_dir", "backend", "vllm.mode", "rollout.policy_url"} | others
    tinker = {lock.full_name for lock in pending(Site(profile="tinker")).shown_locks()}
    assert {"backend", "tinker.base_url"} <= tinker
    assert "ray.address" not in tinker
    assert "env.max_num_workers" in {lock.full_name for lock in pending(name="max_num_workers").locks}
    for profile in ("local", "tinker"):  # a lock that no run accepts would refuse every edit of any other setting
        assert pending(Site(profile=profile)).edit("train.weight_decay", 0.1).value("train.weight_decay") == 0.1


def test_two_clients_edit_without_seeing_each_others(folder):
    shown = []
    sessions = [RlTools(RunManager(folder / "home"), Site()) for _ in range(2)]
    for value, tools in enumerate(sessions, start=3):
        tools._pending = pending()
        edit(tools, "operations", value)
    for tools in sessions:
        fields = {f["name"]: f["current_value"] for f in tools.rl_get_current_config()["configurable_fields"]}
        shown.append(fields["operations"])
    assert shown == [3, 4]


def test_status_is_told_once_in_a_while_and_at_once_when_the_state_changes(folder):
    now = [0.0]
    manager = OneRun(folder / "home")
    tools = RlTools(manager, Site(limits=RequestLimits(status_check_minutes=30)), clock=lambda: now[0])
    look = lambda: tools.rl_check_status("abcd2345")  # noqa: E731
    first = look()
    assert first["metrics"]["reward_mean"] is None  # NaN is no JSON
    assert set(first["processes"].values()) == {"not started"}
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
    tools = RlTools(manager, Site())
    (sentence,) = tools.rl_check_status(run.run_id)["findings"]
    assert "last 4 steps" in sentence
    manager.run = replace(run, state="completed")
    (sentence,) = tools.rl_get_results(run.run_id)["findings"]
    assert "4 of 4 steps" in sentence
    assert tools.rl_get_results(run.run_id)["capability"] is None
    (run.folder / "run.json").write_text(json.dumps({"capability": {"text": "2 calls per attempt"}}))
    assert tools.rl_get_results(run.run_id)["capability"] == "2 calls per attempt"
    (run.folder / "report.json").write_text(json.dumps({"findings": [{"kind": "x", "sentence": "It loops."}]}))
    assert tools.rl_get_results(run.run_id)["findings"] == ["It loops."]


def test_a_started_run_has_the_same_names_in_every_answer(started):
    tools, answer = started
    run_id, config = answer["run_id"], Path(answer["config_path"])
    assert answer["wandb_run_name"] in config.read_text()
    write_text(tools.manager.folder(run_id).wandb_url_file, "https://wandb.ai/me/p/runs/1")
    status, again, (listed,) = (
        tools.rl_check_status(run_id), tools.rl_check_status(run_id), tools.rl_list_runs()["runs"],
    )  # fmt: skip
    for told in (status, tools.rl_get_results(run_id), listed):
        assert told["wandb_url"] == "https://wandb.ai/me/p/runs/1"
        for name in ("environment", "wandb_project", "wandb_run_name"):
            assert told[name] == answer[name], name
    in_trainer = "in the trainer's process"
    assert status["processes"] == {"api": in_trainer, "trainer": "not started", "env": in_trainer}
    assert status["logs"]["env"] == status["logs"]["api"] == status["logs"]["trainer"]
    assert status["running_time_minutes"] == status["minutes_running"]
    assert again["next_check_in_seconds"] == pytest.approx(60 * again["minutes_to_wait"], abs=6)


def test_an_unknown_run_is_an_error_that_names_the_active_ones_however_often_it_is_asked_for(started):
    tools, answer = started
    for tool in ("rl_check_status", "rl_stop_training", "rl_get_results"):
        for run_id in ("zzzzzzzz", "zzzzzzzz", "../../etc/passwd", "", "x" * 10_000, "'; drop table runs"):
            refused = tools.call(tool, {"run_id": run_id})
            assert "no run" in refused["error"]
            assert refused["active_runs"] == [answer["run_id"]]


def test_a_run_that_has_ended_is_stopped_without_an_error_and_its_report_is_told(started):
    tools, answer = started
    folder = tools.manager.folder(answer["run_id"])
    Index(tools.manager.home).move(answer["run_id"], ["pending"], "completed", ended=1.0)
    assert tools.rl_stop_training(answer["run_id"])["message"] == "the run is completed"
    folder.wire.mkdir()
    write_json(folder.report_file, {"before": {"pass_rate": {"rate": 0.1}}, "after": {"pass_rate": {"rate": 0.9}}})
    write_text(folder.report_page, "<html>")
    results = tools.rl_get_results(answer["run_id"])
    assert results["report"] == {"before": {"rate": 0.1}, "after": {"rate": 0.9}, "split": "held_out"}
    assert results["report_path"] == str(folder.report_page)


def test_the_checkpoint_of_a_stopped_run_is_told_to_load_like_a_model(started):
    tools, answer = started
    folder = tools.manager.folder(answer["run_id"])
    Index(tools.manager.home).move(answer["run_id"], ["pending"], "stopped", ended=1.0)
    assert "first checkpoint" in tools.rl_get_results(answer["run_id"])["tip"]
    checkpoint = folder.checkpoints / "step-000003"
    checkpoint.mkdir(parents=True)
    write_json(checkpoint / "manifest.json", {})
    results = tools.rl_get_results(answer["run_id"])
    assert results["weights_path"] is None
    assert results["checkpoint_path"] == str(checkpoint)
    assert f"palestra serve {checkpoint}" in results["tip"]


def test_runs_are_listed_page_by_page(tools, monkeypatch):
    monkeypatch.setattr("palestra.extras.agent_tools.tools.describe", lambda *_: None)
    tools._pending = pending()
    ids = [tools.rl_start_training()["run_id"] for _ in range(3)]
    first, last = tools.rl_list_runs(limit=2), tools.rl_list_runs(limit=2, offset=2)
    assert [run["run_id"] for run in first["runs"]] == ids[:0:-1]
    assert (first["count"], first["next_offset"]) == (3, 2)
    assert [run["run_id"] for run in last["runs"]] == ids[:1]
    assert "next_offset" not in last
    for wrong in ({"limit": 0}, {"limit": 10**9}, {"offset": -1}):
        assert "error" in tools.call("rl_list_runs", wrong)


def test_environments_are_named_by_file_or_name_and_their_errors_are_answers(folder, tools):
    assert RunRequest(environment="/somewhere/good.py:Sums", environment_name="sums").subject == "sums"
    own = replace(pending(), env=replace(pending().env, origin="configured"))
    assert own.request().subject == "calculator"
    path = folder / "environments" / "echo_number.py"
    for old, new, says in (
        ("largest=7", "largest=700", "less than or equal to 99"),
        ("import os", "import os; os._exit(3)", "cannot be read"),
        ("rollout.max_new_tokens", "rollout.max_tokens", "unknown setting 'rollout.max_tokens'"),
    ):
        path.write_text(rl_agent.ENVIRONMENT.replace(old, new))
        assert says in tools.rl_select_environment("echo-number")["error"]
    path.write_text(rl_agent.ENVIRONMENT)
    tools.rl_select_environment("echo-number")
    path.unlink()
    assert "echo_number.py" in tools.rl_start_training()["error"]
    (folder / "mine.py").write_text("from palestra import Env\n\n\nclass Mine(Env):\n    pass\n")
    assert in_file(folder / "mine.py")[0].description == "Environment from mine.py"


def test_keys_are_asked_for_by_name_and_by_need_and_never_told(folder, monkeypatch):
    monkeypatch.setattr("palestra.extras.agent_tools.tools.describe", lambda *_: None)
    keys = {"TINKER_API_KEY": "tk-0123456789", "WANDB_API_KEY": "wk-0123456789"}
    for key in keys:
        monkeypatch.delenv(key, raising=False)
    assert rl_tools.check_rl_python_version()
    assert rl_tools.check_rl_api_keys("local")
    assert get_missing_keys("tinker", ["wandb"]) == list(keys)
    tools = RlTools(OneRun(folder / "home"), Site(profile="tinker"))
    tools._pending = pending(tools.site)
    assert tools.rl_start_training()["missing"] == list(keys)
    for key, value in keys.items():
        monkeypatch.setenv(key, value)
    answer = json.dumps(tools.rl_start_training())
    assert not any(value in answer for value in keys.values())


@pytest.mark.parametrize("found", ["offline", "login"])
def test_wandb_needs_no_key_offline_or_after_a_login(monkeypatch, tmp_path, found):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert get_missing_keys("local", ["wandb"]) == ["WANDB_API_KEY"]
    if found == "offline":
        monkeypatch.setenv("WANDB_MODE", "offline")
    else:
        (tmp_path / "netrc").write_text("machine api.wandb.ai login user password 0123456789\n")
    assert get_missing_keys("local", ["wandb"]) == []


def test_environments_come_in_pages_with_the_users_own_first(folder, tools):
    first = tools.rl_list_environments(limit=2)
    assert first["environments"][0]["name"] == "echo-number"
    assert (len(first["environments"]), first["next_offset"]) == (2, 2)
    rest = tools.rl_list_environments(limit=200, offset=2)
    assert 2 + len(rest["environments"]) == first["count"] == rest["count"]
    assert "next_offset" not in rest
    assert [e["name"] for e in tools.rl_list_environments("calcul")["environments"]] == ["calculator"]
    assert "limit=0" in tools.rl_list_environments(limit=0)["error"]


def test_answers_fit_into_an_agents_context(chosen):
    assert len(json.dumps(chosen.rl_list_environments())) < 10_000
    config = chosen.rl_get_current_config()
    assert len(json.dumps(config)) < 10_000
    names = [field["name"] for field in config["configurable_fields"]]
    assert names[0] == "operations" or "operations" in names[:10]
    assert {"train.max_steps", "rollout.group_size", "model.name"} <= set(names)
    only = chosen.rl_get_current_config(contains="lora.")
    assert {field["name"].partition(".")[0] for field in only["configurable_fields"]} == {"lora"}
    unknown = edit(chosen, "learning_rat", 1)
    assert "train.learning_rate" in unknown["available_fields"]
    assert len(json.dumps(unknown)) < 1000


def test_a_secret_is_neither_taken_nor_told(folder, monkeypatch):
    tools = RlTools(OneRun(folder / "home"), Site())
    tools._pending = pending()
    monkeypatch.setenv("MY_API_KEY", rl_agent.PLANTED)
    assert "secret" in edit(tools, "wandb_name", f"use {rl_agent.PLANTED}")["error"]
    tools.manager.run = replace(tools.manager.run, state="failed", reason=f"401 for {rl_agent.PLANTED}")
    assert tools.rl_check_status("abcd2345")["error"] == "401 for [MY_API_KEY]"


@pytest.mark.parametrize("use_wandb", [True, False])
def test_an_environment_that_tracks_gets_the_trackers_key_and_no_other(monkeypatch, use_wandb):
    for key in ("WANDB_API_KEY", "TINKER_API_KEY"):
        monkeypatch.setenv(key, "k-0123456789")
    request = RunRequest(environment="e", env_settings={"use_wandb": use_wandb})
    environ = process_environment("env", "abcd2345", request)
    assert ("WANDB_API_KEY" in environ, "TINKER_API_KEY" in environ) == (use_wandb, False)
    assert ("WANDB_API_KEY" in env_process_environment(request.env_settings)) == use_wandb


def test_functions_and_coroutines_are_the_tools_over_one_session(folder, monkeypatch):
    monkeypatch.setenv("PALESTRA_HOME", str(folder / "home"))
    rl_tools.this_session.cache_clear()
    assert "error" in rl_tools.rl_get_current_config()
    rl_tools.this_session()._pending = pending()
    assert rl_tools.rl_edit_config("operations", 3)["value"] == 3
    assert rl_tools.rl_list_runs() == {"runs": [], "count": 0}
    assert json.loads(asyncio.run(coroutines.rl_list_runs(limit=5))) == {"runs": [], "count": 0}
    assert "error" in json.loads(asyncio.run(coroutines.rl_check_status("zzzzzzzz")))
    rl_tools.this_session.cache_clear()
    for name, tool in TOOLS.items():
        function = getattr(rl_tools, name)
        assert list(inspect.signature(function).parameters) == list(tool.parameters["properties"])
        assert inspect.getdoc(function).splitlines()[0] == tool.description.splitlines()[0]
        assert inspect.iscoroutinefunction(getattr(coroutines, name))


def test_the_schemas_are_the_published_ones_and_describe_every_parameter(cli):
    assert cli("tools", "schema").out == Path(__file__).with_name("rl_tool_schemas.json").read_text(encoding="utf-8")
    schemas = rl_tools.tool_schemas()
    assert [row["function"]["name"] for row in schemas] == list(rl_tools.TOOL_NAMES)
    for row in schemas:
        function = row["function"]
        assert (row["type"], function["parameters"]["type"]) == ("function", "object")
        assert function["description"]
        assert all("description" in p for p in function["parameters"]["properties"].values()), function["name"]


def test_results_of_models_have_the_names_of_the_other_tools_too():
    records = [{"passed": [True, False], "scores": [1.0, 0.25]}, {"passed": [False, False], "scores": [0.0, 0.0]}]
    row = {"model": "m", "status": "completed", "cost_usd": None, "prompt_tokens": 0, "completion_tokens": 0}
    row |= _scores(records)
    assert row["steps"][0] == {"step": 1, "completions": 2, "correct": 1, "scores": [1.0, 0.25]}
    assert row["steps_with_correct"] == 1
    assert (row["total_completions"], row["correct_completions"]) == (4, 1)
    failed = {**row, **_scores([]), "status": "failed"}
    summary = _summary([row, failed], 1.0)
    assert (summary["models_succeeded"], summary["avg_accuracy"], summary["environment_working"]) == (1, 0.25, True)
    assert not _summary([failed], 1.0)["environment_working"]
    assert [Candidate(m, m).scale for m in (*OPENROUTER_MODELS, "x")] == ["small", "medium", "large", None]
    assert _scores([{"scores": [1.0, 0.5, -1.0]}])["correct"] == 1  # atroposlib has no verdict: a score of 1 counts


def test_endpoint_settings_by_the_names_of_atroposlib():
    names = {"timeout": "5", "num_max_requests_at_once": "3", "api_key": "none", "server_type": "openai"}
    read = OpenAISettings.read({"model_name": "m", **names})
    assert (read.timeout_s, read.max_concurrent) == (5.0, 3)
    for wrong in ({"server_type": "sglang"}, {"health_check": "true"}, {"api_key": "sk-1"}):
        with pytest.raises(SettingError, match=next(iter(wrong))):
            OpenAISettings.read({"model_name": "m", **wrong})


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
    batch_size: int = -1
    max_num_workers: int = -1
    wandb_name: str | None = None


class BaseEnv:
    pass
"""


def wheel(folder, name, version, files):
    """A package that pip installs without a network."""
    about = f"{name}-{version}.dist-info"
    texts = {
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        **files,
    }
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in texts.items():
            archive.writestr(path, text)
        archive.writestr(f"{about}/RECORD", "".join(f"{path},,\n" for path in [*texts, f"{about}/RECORD"]))


@pytest.fixture
def atroposlib(folder, monkeypatch):
    """An empty cache, and small packages under the names that an environment needs, which pip can install."""
    wheels = folder / "wheels"
    wheels.mkdir()
    ours = f"{sysconfig.get_paths()['purelib']}\n"  # has pydantic
    wheel(wheels, "atroposlib", "0.4.0", {"atroposlib/envs/base.py": ATROPOSLIB, "zz_pydantic.pth": ours})
    wheel(wheels, "transformers", "4.57.6", {})
    wheel(wheels, "lemmata", "1.0", {"lemmata.py": "SIZE = 12\n"})
    for name, value in {
        "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PALESTRA_CACHE": str(folder / "cache"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)


def test_selecting_an_atropos_environment_installs_what_it_needs_and_tells_its_progress(folder, atroposlib):
    game, other = folder / "environments" / "game", folder / "environments" / "other.py"
    game.mkdir()
    (game / "parts.py").write_text("from lemmata import SIZE\n")
    (game / "gsm.py").write_text("from .parts import SIZE\n" + ATROPOS.replace("group_size=12", "group_size=SIZE"))
    (game / "requirements.txt").write_text("# of the environment\n--index-url http://elsewhere\nlemmata  # words\n")
    other.write_text("import nowhere_words\n" + ATROPOS.replace('"gsm"', '"other"'))
    tools, told = RlTools(OneRun(folder / "home"), Site()), []
    answer = tools.call("rl_select_environment", {"name": "gsm"}, progress=lambda *row: told.append(row))
    assert answer["environment"] == "gsm"
    for package in ("atroposlib", "lemmata"):
        assert any(package in text for _, _, text in told), package
    done = [done for done, _, _ in told]
    assert done == sorted(set(done))
    assert done[-1] < 1
    assert tools.rl_edit_config("group_size", 6)["value"] == 6
    assert tools.rl_start_training()["status"] == "starting"
    refused = tools.rl_select_environment("other")["error"]
    assert "nowhere_words" in refused
    assert str(other.with_name("requirements.txt")) in refused


def test_batch_size_of_an_atropos_environment_reaches_the_trainer(folder):
    (folder / "environments" / "gsm.py").write_text(ATROPOS)
    found = in_file(folder / "environments" / "gsm.py")[0]
    rows = [
        {"name": name, "type": "int", "default": default, "description": "", "schema": {"type": "integer"}}
        for name, default in (("group_size", 4), ("batch_size", -1))
    ]
    prepared = PendingRunConfig.of(found, EnvDescription(rows, {}), Site())
    edited = prepared.edit("batch_size", 8)
    assert edited.settings()["train.problems_per_step"] == 2
    assert "batch_size" not in edited.env_settings()  # atroposlib takes the trainer's
    assert prepared.edit("group_size", 2).edit("batch_size", 8).settings()["train.problems_per_step"] == 4
    with pytest.raises(Refusal, match="multiple of group_size = 4"):
        prepared.edit("batch_size", 10)
    locked = PendingRunConfig.of(found, EnvDescription(rows, {}), Site(run={"train.problems_per_step": 3}))
    with pytest.raises(Refusal, match="locked"):
        locked.edit("batch_size", 8)


def test_an_atropos_environment_is_set_up_in_the_python_that_can_import_it(folder, monkeypatch):
    (folder / "environments" / "gsm.py").write_text(ATROPOS)
    monkeypatch.delenv("PALESTRA_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    manager = OneRun(folder / "home")
    tools = RlTools(manager, Site())
    library = folder / "library" / "atroposlib" / "envs"
    library.mkdir(parents=True)
    (library / "base.py").write_text(ATROPOSLIB)
    python = folder / "cache" / "palestra" / f"atropos-0.4.0-py3.{sys.version_info.minor}" / "bin" / "python"
    python.parent.mkdir(parents=True)
    write_json(python.parents[1] / "ready.json", PACKAGES)
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
