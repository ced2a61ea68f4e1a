"""A setting that findings recommend is one that the kind of run accepts."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.run_folder import RunKind
from palestra.evals.evidence import TAKES_EFFECT, RunFacts
from palestra.extras.atropos.task import WireTask
from palestra.extras.step_trainer.trainer import _resolve
from palestra.extras.tinker.client.backend import suited
from palestra.extras.vllm.open import open_policy
from palestra.sources.programs.task import ProgramTask
from palestra.train.tasks import EnvironmentTask, require_ranks_support

VALUES: dict[str, Any] = {
    "rollout.constrain_tool_calls": True, "rollout.max_tool_rounds": 3, "rollout.max_tool_result_chars": 1000,
    "rollout.max_staleness": 2, "rollout.temperature": 0.9, "rollout.max_new_tokens": 2048, "rollout.group_size": 16,
    "model.kv_memory_gib": 2.0, "model.name": "other", "train.signal_share": 1.0, "train.entropy_coefficient": 0.01,
    "train.learning_rate": 1e-7, "train.problems_per_step": 8, "train.stop_when_solved": 3, "stages.plan": "auto",
}  # fmt: skip


def parts_of(config: RunConfig) -> Any:
    return SimpleNamespace(config=config)


def accepts(check: Callable[[RunConfig], Any], config: RunConfig) -> bool:
    """Whether a check gets past its refusals. It fails later, since there is no model."""
    try:
        check(config)
    except PalestraError as error:
        return not any(words in str(error) for words in ("has no effect here", "scores tokens at temperature 1"))
    except Exception:
        return True
    return True


def function_task(config: RunConfig) -> None:
    EnvironmentTask(SimpleNamespace(reward_weights={}), rollout_func=print).collector(parts_of(config), training=True)  # type: ignore[arg-type]


def several_ranks(config: RunConfig) -> None:
    require_ranks_support(config, EnvironmentTask(None), None)  # type: ignore[arg-type]


RUNS: dict[str, tuple[RunKind, dict[str, Any], Callable[[RunConfig], Any]]] = {
    "prompts": ("prompts", {}, _resolve),
    "program": ("program", {}, lambda config: ProgramTask(None, None, None).source(parts_of(config))),  # type: ignore[arg-type]
    "wire": ("wire", {}, lambda config: WireTask(None, None, None, None).source(parts_of(config))),  # type: ignore[arg-type]
    "function": ("function", {}, function_task),
    "tinker": ("agent", {"backend": "tinker"}, suited),
    "vllm": ("agent", {"vllm.mode": "server"}, lambda config: open_policy(None, None, config)),
    "ranks": ("agent", {}, several_ranks),
}


def run_of(name: str, *more: str) -> Any:
    marks = [pytest.mark.extras] if name in ("wire", "tinker", "vllm") else []
    return pytest.param(name, *more, marks=marks)


@pytest.fixture(autouse=True)
def no_wait_for_a_vllm_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none; only the checks before it is asked are of interest."""
    monkeypatch.setattr("palestra.extras.vllm.server._START_S", 0.0)


@pytest.mark.parametrize("run", [*map(run_of, RUNS)])
@pytest.mark.parametrize("setting", VALUES)
def test_no_setting_is_recommended_that_the_run_refuses(run: str, setting: str) -> None:
    kind, base, check = RUNS[run]
    facts = RunFacts(RunConfig.build(base), kind, ranks=2 if run == "ranks" else 1)
    assert accepts(check, RunConfig.build(base)), "of which nothing is changed"
    if facts.allows(setting):
        assert accepts(check, RunConfig.build(base, {setting: VALUES[setting]}))


@pytest.mark.parametrize(
    ("run", "setting"),
    [
        run_of("prompts", "rollout.max_staleness"),
        run_of("program", "rollout.max_tool_rounds"),
        run_of("wire", "rollout.constrain_tool_calls"),
        run_of("function", "rollout.constrain_tool_calls"),
        run_of("tinker", "train.entropy_coefficient"),
        run_of("tinker", "rollout.temperature"),
        run_of("vllm", "model.kv_memory_gib"),
        run_of("ranks", "rollout.max_staleness"),
    ],
)
def test_the_checks_of_this_file_do_refuse(run: str, setting: str) -> None:
    _, base, check = RUNS[run]
    assert not accepts(check, RunConfig.build(base, {setting: VALUES[setting]}))


def test_every_setting_with_conditions_is_tried_here() -> None:
    known = set(RunConfig.keys())
    assert {name for name in TAKES_EFFECT if name in known} - {"rollout.unexpected_call_format"} <= set(VALUES)
