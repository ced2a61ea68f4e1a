"""The names that agents know from elsewhere: in what the tools take, and in what they answer."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from palestra.core.errors import PalestraError
from palestra.core.files import write_json, write_text
from palestra.core.run_folder import RunFolder
from palestra.envs.config_fields import EnvDescription
from palestra.envs.discover import in_file
from palestra.faces import rl_tools
from palestra.faces.rl_tools import RlTools, coroutines
from palestra.faces.rl_tools.endpoints import OPENROUTER_MODELS, Candidate
from palestra.faces.rl_tools.inference import _scores, _summary
from palestra.faces.rl_tools.pending_run import PendingRunConfig
from palestra.policy.openai import OpenAISettings
from palestra.runs.index import Index
from palestra.runs.locks import Site
from palestra.runs.manager import RunManager, RunRequest
from palestra.runs.request import process_environment
from palestra.wire.atropos import env_process_environment

sys.path.insert(0, str(Path(__file__).parent))
import rl_agent


class NothingStarts(RunManager):
    """A manager whose runs are listed and never launched."""

    def _launch(self, run_id: str, folder: RunFolder) -> None:
        pass


@pytest.fixture
def tools(tmp_path, monkeypatch):
    rl_agent.make_site(tmp_path)
    monkeypatch.chdir(tmp_path)
    return RlTools(NothingStarts(tmp_path / "home"), Site())


def draft_of(site: Site = Site(), **field: object) -> PendingRunConfig:  # noqa: B008
    """A draft of the built-in calculator, without asking it for its settings."""
    (found,) = in_file(Path(rl_tools.__file__).parents[2] / "envs" / "library" / "calculator.py")
    row = {"name": "operations", "type": "int", "default": 1, "description": "", "schema": {"type": "integer"}}
    return PendingRunConfig.of(found, EnvDescription([{**row, **field}], {}), site)


@pytest.fixture
def started(tools):
    tools._pending = draft_of()
    return tools, tools.rl_start_training()


def test_the_config_that_the_answer_names_is_there(started):
    _, answer = started
    assert Path(answer["config_path"]).is_file()
    assert answer["wandb_run_name"] in Path(answer["config_path"]).read_text()


def test_status_results_and_list_say_the_same_names_as_start(started):
    tools, answer = started
    run_id = answer["run_id"]
    (listed,) = tools.rl_list_runs()["runs"]
    for told in (tools.rl_check_status(run_id), tools.rl_get_results(run_id), listed):
        for name in ("environment", "wandb_project", "wandb_run_name", "wandb_url"):
            assert told[name] == answer[name], name


def test_an_environment_in_a_file_is_listed_by_its_name(tools):
    request = RunRequest(environment="/somewhere/good.py:Sums", environment_name="sums")
    assert request.subject == "sums"
    assert replace(draft_of(), found=replace(draft_of().found, origin="configured")).request().subject == "calculator"


def test_the_address_at_weights_and_biases_is_told_once_it_is_known(started):
    tools, answer = started
    folder = tools.manager.folder(answer["run_id"])
    write_text(folder.wandb_url_file, "https://wandb.ai/me/p/runs/1")
    assert tools.rl_check_status(answer["run_id"])["wandb_url"] == "https://wandb.ai/me/p/runs/1"


def test_a_run_in_one_process_says_where_its_api_and_environment_are(started):
    tools, answer = started
    status = tools.rl_check_status(answer["run_id"])
    assert status["processes"] == {
        "api": "in the trainer's process", "trainer": "not started", "env": "in the trainer's process",
    }  # fmt: skip
    assert status["logs"]["env"] == status["logs"]["api"] == status["logs"]["trainer"]


def test_times_have_both_names(started):
    tools, answer = started
    first, second = tools.rl_check_status(answer["run_id"]), tools.rl_check_status(answer["run_id"])
    assert first["running_time_minutes"] == first["minutes_running"]
    assert second["next_check_in_seconds"] == pytest.approx(60 * second["minutes_to_wait"], abs=6)


def test_who_asks_for_an_unknown_run_is_told_the_active_ones(started):
    tools, answer = started
    for tool in ("rl_check_status", "rl_stop_training", "rl_get_results"):
        for run_id in ("zzzzzzzz", "../x"):
            assert tools.call(tool, {"run_id": run_id})["active_runs"] == [answer["run_id"]]


def test_stopping_a_run_that_has_ended_is_a_message(started):
    tools, answer = started
    Index(tools.manager.home).move(answer["run_id"], ["pending"], "completed", ended=1.0)
    told = tools.rl_stop_training(answer["run_id"])
    assert "error" not in told
    assert told["message"] == "the run is completed"


def test_the_report_of_a_run_over_the_wire_is_told(started):
    tools, answer = started
    folder = tools.manager.folder(answer["run_id"])
    folder.wire.mkdir()
    write_json(folder.report_file, {"before": {"pass_rate": {"rate": 0.1}}, "after": {"pass_rate": {"rate": 0.9}}})
    write_text(folder.report_page, "<html>")
    results = tools.rl_get_results(answer["run_id"])
    assert results["report"] == {"before": {"rate": 0.1}, "after": {"rate": 0.9}, "split": "held_out"}
    assert results["report_path"] == str(folder.report_page)


def test_runs_are_listed_page_by_page(tools):
    tools._pending = draft_of()
    ids = [tools.rl_start_training()["run_id"] for _ in range(3)]
    first = tools.rl_list_runs(limit=2)
    assert [run["run_id"] for run in first["runs"]] == ids[:0:-1]
    assert (first["count"], first["next_offset"]) == (3, 2)
    last = tools.rl_list_runs(limit=2, offset=2)
    assert [run["run_id"] for run in last["runs"]] == ids[:1]
    assert "next_offset" not in last
    for wrong in ({"limit": 0}, {"limit": 10**9}, {"offset": -1}):
        assert "error" in tools.call("rl_list_runs", wrong)


@pytest.mark.parametrize(
    ("name", "value", "key", "read"),
    [
        ("group_size", 8, "rollout.group_size", 8),
        ("total_steps", "20", "train.max_steps", 20),
        ("batch_size", 16, "train.problems_per_step", 4),  # attempts there, problems here; groups of 4
        ("wandb_project", "mine", "track.project", "mine"),
        ("learning_rate", 1e-4, "train.learning_rate", 1e-4),
        ("lora_rank", 8, "lora.r", 8),
        ("use_wandb", True, "track.report_to", ["wandb"]),
    ],
)
def test_short_names_of_other_trainers_are_taken(tools, name, value, key, read):
    tools._pending = draft_of().edit("rollout.group_size", 4)
    answer = tools.rl_edit_config(name, value)
    assert (answer["field"], answer["value"]) == (key, read)
    assert tools.pending.settings()[key] == read


def test_a_batch_that_is_no_whole_number_of_groups_is_refused(tools):
    tools._pending = draft_of().edit("rollout.group_size", 4)
    assert "multiple of rollout.group_size = 4" in tools.rl_edit_config("batch_size", 10)["error"]


def test_a_batch_of_attempts_needs_a_group_size(tools):
    tools._pending = draft_of()
    assert "set rollout.group_size first" in tools.rl_edit_config("batch_size", 16)["error"]


def test_a_short_name_is_the_environments_own_where_it_has_such_a_field():
    assert draft_of(name="group_size").edit("group_size", 9).env_settings() == {"group_size": 9}


def test_a_short_name_of_a_locked_setting_is_locked(tools):
    tools._pending = draft_of(Site(run={"rollout.group_size": 6}))
    assert tools.rl_edit_config("group_size", 8)["locked_value"] == 6


def test_every_lock_that_is_shown_locks_something():
    """An environment of ours reads no setting of a server, and none that it does not have."""
    shown = {lock.full_name for lock in draft_of().shown_locks()}
    assert shown == {"trainer.checkpoint_dir", "backend", "vllm.mode", "rollout.policy_url"}
    tinker = {lock.full_name for lock in draft_of(Site(profile="tinker")).shown_locks()}
    assert {"backend", "tinker.base_url"} <= tinker
    assert "ray.address" not in tinker
    assert "env.max_num_workers" in {lock.full_name for lock in draft_of(name="max_num_workers").locks}


@pytest.mark.parametrize("profile", ["local", "tinker"])
def test_what_a_profile_locks_is_valid_for_a_run(profile):
    """A lock that no run accepts would refuse every edit of any other setting."""
    assert draft_of(Site(profile=profile)).edit("train.weight_decay", 0.1).value("train.weight_decay") == 0.1


def test_an_environment_without_a_docstring_is_described_by_its_file(tmp_path):
    (tmp_path / "mine.py").write_text("from palestra import Env\n\n\nclass Mine(Env):\n    pass\n")
    (found,) = in_file(tmp_path / "mine.py")
    assert found.description == "Environment from mine.py"


def test_the_coroutines_answer_json_text(tmp_path, monkeypatch):
    monkeypatch.setenv("PALESTRA_HOME", str(tmp_path))
    rl_tools.this_session.cache_clear()
    text = asyncio.run(coroutines.rl_list_runs(limit=5))
    assert json.loads(text) == {"runs": [], "count": 0}
    assert "error" in json.loads(asyncio.run(coroutines.rl_check_status("zzzzzzzz")))
    rl_tools.this_session.cache_clear()
    for name in rl_tools.TOOL_NAMES:
        assert inspect.iscoroutinefunction(getattr(coroutines, name))


@pytest.mark.parametrize(("use_wandb", "sees_it"), [(True, True), (False, False)])
def test_an_environment_that_tracks_gets_the_trackers_key_and_no_other(monkeypatch, use_wandb, sees_it):
    for key in ("WANDB_API_KEY", "TINKER_API_KEY"):
        monkeypatch.setenv(key, "k-0123456789")
    request = RunRequest(environment="e", env_settings={"use_wandb": use_wandb})
    environ = process_environment("env", "abcd2345", request)
    assert ("WANDB_API_KEY" in environ, "TINKER_API_KEY" in environ) == (sees_it, False)
    assert ("WANDB_API_KEY" in env_process_environment(request.env_settings)) == sees_it


def test_results_of_models_have_the_names_of_the_other_tools_too():
    records = [{"passed": [True, False], "scores": [1.0, 0.25]}, {"passed": [False, False], "scores": [0.0, 0.0]}]
    row = {"model": "m", "status": "completed", "cost_usd": None, "prompt_tokens": 0, "completion_tokens": 0}
    row |= _scores(records)
    assert row["steps"][0] == {"step": 1, "completions": 2, "correct": 1, "scores": [1.0, 0.25]}
    assert row["steps_with_correct"] == 1
    failed = {**row, **_scores([]), "status": "failed"}
    summary = _summary([row, failed], 1.0)
    assert (summary["models_succeeded"], summary["avg_accuracy"], summary["environment_working"]) == (1, 0.25, True)
    assert not _summary([failed], 1.0)["environment_working"]
    assert [Candidate(m, m).scale for m in (*OPENROUTER_MODELS, "x")] == ["small", "medium", "large", None]


def test_an_atropos_score_of_one_counts_as_correct():
    assert _scores([{"scores": [1.0, 0.5, -1.0]}])["correct"] == 1


def test_endpoint_settings_by_the_names_of_atroposlib():
    given = {
        "model_name": "m",
        "timeout": "5",
        "num_max_requests_at_once": "3",
        "api_key": "none",
        "server_type": "openai",
    }
    read = OpenAISettings.read(given)
    assert (read.timeout_s, read.max_concurrent) == (5.0, 3)
    for wrong in ({"server_type": "sglang"}, {"health_check": "true"}, {"api_key": "sk-1"}):
        with pytest.raises(PalestraError, match=next(iter(wrong))):
            OpenAISettings.read({"model_name": "m", **wrong})
