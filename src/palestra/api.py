"""The main functions: an agent, a suite and measures -> a better model, and the proof."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.agents.agent import Agent
from palestra.core.config import RunConfig, flatten
from palestra.core.errors import SettingError, explain_arguments
from palestra.core.files import refuse_in_import
from palestra.core.grpo_config import GRPOTrainingConfig
from palestra.core.run_folder import Resume, RunFolder
from palestra.core.time_limit import outside_event_loop
from palestra.envs.suite_env import SuiteEnvironment
from palestra.evals.report import EvalReport
from palestra.evals.suite import EvalSuite, require_suite
from palestra.result import GRPOTrainingResult
from palestra.rollout.evaluate import EvalFile
from palestra.rollout.rewards import RewardFunctionList
from palestra.train.watcher import Watcher
from palestra.trainer import TRAINER_ARGUMENTS, TRL_NAMES, Config, GRPOTrainer

if TYPE_CHECKING:
    from palestra.train.run import Outcome
    from palestra.train.tasks import Task

__all__ = ["GRPOTrainer", "GRPOTrainingConfig", "GRPOTrainingResult", "evaluate", "train_grpo", "train_sft"]


@explain_arguments(TRL_NAMES)
def train_grpo(
    agent: Any,
    suite: EvalSuite,
    reward_measures: Sequence[Any] | None = None,
    *,
    config: Config = None,
    reward_weights: Sequence[float] | Mapping[str, float] | None = None,
    torch_dtype: str | None = None,
    device_map: str | None = None,
    environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
    extra_reward_funcs: RewardFunctionList = None,
    rollout_func: Callable[..., Any] | None = None,
    advantages: Callable[..., Any] | None = None,
    loss: Callable[..., Any] | None = None,
    held_out: EvalSuite | float | None = 0.2,
    progress: bool = True,
    watcher: Watcher | None = None,
    name: str | None = None,
    source: str | None = None,
    folder: Path | str | None = None,
    resume: Path | str | Resume | None = None,
    record: Mapping[str, Any] | None = None,
) -> GRPOTrainingResult:
    """Train `agent` on the cases of `suite` with the measures as its reward.

    `agent` may also be a program with a loop of its own: `command_agent(["python", "my_agent.py"])`, or a function
    (case, base_url, api_key), async or not, that calls the model over HTTP.
    `advantages` and `loss` are functions in the place of the built-in ones: from a step's batch to advantages, and from
    tokens to their losses (docs/objectives.md).
    `held_out` is a suite, or the share of `suite` kept aside for the before/after report; with 0 all cases are trained
    on, and the report is about them. `progress`: a bar, or lines where there is no terminal; a `watcher` replaces it.
    `folder` becomes the run folder, instead of a new one in the config's output_dir.
    `resume` is a run folder to go on with; its config is used. `Resume(folder, checkpoint="best", max_steps=100)`
    chooses the checkpoint and the steps in total. `record` is more to be written down in the run folder's run.json.
    """
    given = locals()
    trainer = GRPOTrainer(**{name: given[name] for name in TRAINER_ARGUMENTS})
    return trainer.train(suite, held_out=held_out, resume=resume, record=record)


def train_sft(
    config: Config,
    *,
    name: str = "sft",
    watcher: Watcher | None = None,
    folder: Path | None = None,
    resume: Path | str | Resume | None = None,
) -> tuple[RunFolder, Outcome]:
    """Learn from conversations alone, those of `stages.traces`; nothing is scored.

    To score an agent before and after, use `train_grpo` with `{"stages.plan": "sft", "stages.traces": …}`.
    """
    settings = config.to_run_config() if isinstance(config, GRPOTrainingConfig) else RunConfig.of(config)
    if settings.stages.traces is None:
        raise SettingError("there is nothing to learn from; give stages.traces, a file of conversations or a run")
    if settings.stages.plan != "sft":
        raise SettingError(f"stages.plan = {settings.stages.plan!r} attempts cases; use train_grpo with an agent")

    def task(config: RunConfig) -> Task:
        from palestra.train.tasks import FinishTask

        return FinishTask(None, kind="other")

    agent = Agent(name, settings.model.name)
    trainer = GRPOTrainer(agent, config=settings, watcher=watcher, folder=folder)
    return trainer.train_task(task, {"only_learns_traces": True}, resume)


@explain_arguments(TRL_NAMES)
def evaluate(
    agent: Any,
    suite: EvalSuite,
    measures: Sequence[Any] | None = None,
    *,
    config: Config = None,
    reward_weights: Sequence[float] | Mapping[str, float] | None = None,
    progress: bool = True,
    watcher: Watcher | None = None,
    out: str | Path | None = None,
    resume: bool = False,
) -> EvalReport:
    """Score an agent on a suite, without training.

    `out` is a file for the attempts, one JSON line each, written as they end; with `resume`, those that it holds are
    not made again.
    """
    if resume and out is None:
        raise SettingError("resume needs the file of the evaluation: out=…")
    refuse_in_import("an evaluation")
    require_suite(suite)
    trainer = GRPOTrainer(agent, measures, config=config, progress=progress, watcher=watcher)
    environment = SuiteEnvironment(trainer.agent, suite, suite, measures, reward_weights)
    file = None
    if out is not None:
        file = EvalFile(Path(out), _about_attempts(trainer.config, trainer.agent, environment), resume=resume)

    def score() -> EvalReport:
        from palestra.policy.build import policy_of
        from palestra.train.setup import suited_to
        from palestra.train.tasks import Parts

        trainer.config.refuse(["backend", "tinker", "ray"], "a model that is not in training is scored here")
        loaded = trainer._load(trainer.config, training=False)
        config = suited_to(trainer.config, loaded.model)
        policy = policy_of(loaded.model, loaded.tokenizer, config.model)
        with trainer._watching() as watcher, asyncio.Runner() as runner:
            parts, task = Parts(config, policy, loaded.tokenizer, runner, watcher), trainer._task(environment, config)
            evaluator = task.evaluator(parts)
            assert evaluator is not None
            try:
                return evaluator.run(runner, watcher, "scoring", file)
            finally:
                if close := getattr(task, "close", None):
                    close(runner)

    with closing(environment):
        return outside_event_loop(score)


def _about_attempts(config: RunConfig, agent: Any, environment: SuiteEnvironment) -> dict[str, Any]:
    """What the result of an attempt depends on; attempts can be counted together if they agree in it."""
    settings = flatten(config.model_dump(mode="json", include={"seed", "rollout", "agent"}))
    settings |= {f"eval.{name}": getattr(config.eval, name) for name in ("temperature", "samples_per_case")}
    model, told = config.model.name, getattr(agent, "instructions", None)
    about = {"agent": agent.name, "model.name": model, "instructions": told if isinstance(told, str) else None}
    return {**about, "reward_weights": dict(environment.reward_weights), **settings}
