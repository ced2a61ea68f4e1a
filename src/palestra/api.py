"""The main functions: an agent, a suite and measures -> a better model, and the proof."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.agents.agent import agent_examples
from palestra.agents.openai_agents import as_agent
from palestra.agents.programs import ProgramAgent
from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError, explain_arguments, needs_extra
from palestra.core.event_loop import outside_event_loop
from palestra.core.files import refuse_in_import
from palestra.core.grpo_config import GRPOTrainingConfig
from palestra.core.run_folder import Resume, RunFolder
from palestra.envs.adapters.factory import FactoryEnv, owns_reward
from palestra.envs.base import Environment
from palestra.envs.running import RunningEnv
from palestra.envs.suite_env import SuiteEnvironment
from palestra.evals.report import EvalReport
from palestra.evals.suite import EvalSuite, hold_out, require_suite
from palestra.models.progress_bars import hidden_progress_bars, is_local
from palestra.result import GRPOTrainingResult
from palestra.rollout.rewards import RewardFunctionList, as_list
from palestra.train.watcher import Watcher

if TYPE_CHECKING:
    from palestra.models.loading import LoadedModel
    from palestra.train.run import Outcome
    from palestra.train.tasks import Task

__all__ = ["GRPOTrainer", "GRPOTrainingConfig", "GRPOTrainingResult", "evaluate", "train_grpo", "train_sft"]

Config = GRPOTrainingConfig | RunConfig | Mapping[str, Any] | None

# Arguments of TRL's GRPOTrainer, and where they go here.
TRL_NAMES = {
    "model": "agent", "tools": "agent", "reward_funcs": "extra_reward_funcs", "args": "config", "peft_config": "config",
    "train_dataset": "suite", "eval_dataset": "held_out", "callbacks": "watcher",
}  # fmt: skip


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
    `held_out` is a suite, or the share of `suite` kept aside for the before/after report; with 0 all cases are trained
    on, and the report is about them. `progress`: a bar, or lines where there is no terminal; a `watcher` replaces it.
    `folder` becomes the run folder, instead of a new one in the config's output_dir.
    `resume` is a run folder to go on with; its config is used. `Resume(folder, checkpoint="best", max_steps=100)`
    chooses the checkpoint and the steps in total. `record` is more to be written down in the run folder's run.json.
    """
    trainer = GRPOTrainer(
        agent,
        reward_measures,
        config=config,
        reward_weights=reward_weights,
        torch_dtype=torch_dtype,
        device_map=device_map,
        environment_factory=environment_factory,
        extra_reward_funcs=extra_reward_funcs,
        rollout_func=rollout_func,
        progress=progress,
        watcher=watcher,
        name=name,
        source=source,
        folder=folder,
    )
    return trainer.train(suite, held_out=held_out, resume=resume, record=record)


class GRPOTrainer:
    """The same in two steps: build, then `.train(suite)`; `.model` and `.tokenizer` are there in between."""

    @explain_arguments(TRL_NAMES)
    def __init__(
        self,
        agent: Any,
        reward_measures: Sequence[Any] | None = None,
        *,
        config: Config = None,
        reward_weights: Sequence[float] | Mapping[str, float] | None = None,
        torch_dtype: str | None = None,
        device_map: str | None = None,
        environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
        extra_reward_funcs: RewardFunctionList = None,
        rollout_func: Callable[..., Any] | None = None,
        progress: bool = True,
        watcher: Watcher | None = None,
        name: str | None = None,
        source: str | None = None,
        folder: Path | str | None = None,
    ) -> None:
        self.agent = as_agent(agent)
        self._model_name = self.agent.required_model
        self._measures = reward_measures
        self._weights = reward_weights
        self._config = config
        self._overrides = {key: v for key, v in (("dtype", torch_dtype), ("device", device_map)) if v is not None}
        self._reward_functions = as_list(extra_reward_funcs)
        self._factory = environment_factory
        self._rollout_func = rollout_func
        self._progress = progress
        self._watcher = watcher
        self._name = name or self.agent.name
        self._source = source
        self._folder = None if folder is None else Path(folder)
        self._loaded: Any = None

    @property
    def model(self) -> Any:
        return self._load(self.config).model

    @property
    def tokenizer(self) -> Any:
        return self._load(self.config).tokenizer

    @property
    def config(self) -> RunConfig:
        return self._resolve(None)

    def _resolve(self, problems: int | None) -> RunConfig:
        layer: Mapping[str, Any]
        match self._config:
            case GRPOTrainingConfig():
                layer = self._config.to_run_config(problems).model_dump()
            case RunConfig():
                layer = self._config.model_dump()
            case Mapping() | None:
                layer = dict(self._config or {})
            case other:
                kind = type(other).__name__
                raise PalestraError(f"config is of type {kind}; expected a dict of settings or a GRPOTrainingConfig")
        return RunConfig.build(dict(layer), {"model": {"name": self._model_name, **self._overrides}})

    def _load(self, config: RunConfig) -> Any:
        if self._loaded is None:
            self._loaded = load_quietly(config)
        return self._loaded

    def train(
        self,
        suite: EvalSuite,
        *,
        held_out: EvalSuite | float | None = 0.2,
        resume: Path | str | Resume | None = None,
        record: Mapping[str, Any] | None = None,
    ) -> GRPOTrainingResult:
        """Evaluate, train, evaluate again; everything is recorded in a run folder."""
        train_suite, held = hold_out(suite, held_out)
        scored_elsewhere = bool(self._reward_functions) or (self._factory is not None and owns_reward(self._factory))
        if isinstance(self.agent, ProgramAgent):
            scored_elsewhere |= self.agent.posts_reward
        cases = SuiteEnvironment(
            self.agent, train_suite, held, self._measures, self._weights, measures_required=not scored_elsewhere
        )
        with closing(cases):
            if self._factory is None:
                return self.train_on(cases, resume=resume, record=record)
            environment = RunningEnv(FactoryEnv(self._factory, cases, self.agent.fixed_instructions))
            return self.train_on(environment, resume=resume, record=record)

    def train_on(
        self,
        environment: Environment,
        *,
        record: Mapping[str, Any] | None = None,
        resume: Path | str | Resume | None = None,
    ) -> GRPOTrainingResult:
        """The same on any environment: it gives problems, tools and scores, the agent only its model and name.

        `record` is more to be written down in the run folder's run.json.
        """
        self._loaded = None if resume is not None else self._loaded  # a resumed run loads the published weights
        run, outcome = train_task(
            lambda config: self._task(environment, config),
            lambda: self._resolve(len(environment.problems("train"))),
            name=self._name,
            record=self._record() | dict(record or {}),
            folder=self._folder,
            resume=resume,
            watching=self._watching,
            load=self._load,
        )
        return GRPOTrainingResult(self.agent, run, outcome, self)

    def _record(self) -> dict[str, Any]:
        return {
            "source": self._source,
            "agent": self.agent.name,
            "instructions": self.agent.instructions,
            "tools": [tool.schema for tool in self.agent.tools],
        }

    def _task(self, environment: Environment, config: RunConfig) -> Task:
        """What is trained on: our agent loop in an environment, or a program at the gateway."""
        from palestra.train.tasks import EnvironmentTask

        if not isinstance(self.agent, ProgramAgent):
            examples = agent_examples(self.agent)
            return EnvironmentTask(environment, self._reward_functions, self._rollout_func, self, examples)
        if self._rollout_func is not None or not isinstance(environment, SuiteEnvironment):
            raise PalestraError(
                f"{self.agent.name} is a program with a loop of its own; train it on a suite, without rollout_func and "
                "environment_factory"
            )
        with needs_extra("training a program", "serve"):
            from palestra.sources.programs.task import ProgramTask
        return ProgramTask(environment, self.agent, self._load(config), self._reward_functions)

    def _watching(self) -> AbstractContextManager[Watcher]:
        return watching(self._watcher, self._progress)


def watching(watcher: Watcher | None, progress: bool = True) -> AbstractContextManager[Watcher]:
    """The given watcher, else a progress display, else a watcher that shows nothing."""
    if watcher is not None or not progress:
        return nullcontext(watcher or Watcher())
    from palestra.train.progress import console_progress

    return console_progress()


def load_quietly(config: RunConfig) -> LoadedModel:
    """Load the model of a run; a progress bar shows only downloads."""
    from palestra.train.setup import load_for_run

    with hidden_progress_bars() if is_local(config.model.name) else nullcontext():
        return load_for_run(config)


def train_task(
    task: Callable[[RunConfig], Task],
    config: Callable[[], RunConfig],
    *,
    name: str,
    record: Mapping[str, Any],
    folder: Path | None = None,
    resume: Path | str | Resume | None = None,
    watching: Callable[[], AbstractContextManager[Watcher]],
    load: Callable[[RunConfig], LoadedModel] = load_quietly,
) -> tuple[RunFolder, Outcome]:
    """Train in a new run folder, or continue a run with the config in its folder."""
    refuse_in_import("a training")
    resumed = Resume.of(resume)
    if resumed is not None:
        run = RunFolder.open(resumed.folder)
        chosen = run.config
        loaded = load(chosen)
    else:
        chosen = config()
        loaded = load(chosen)  # a model that cannot be loaded leaves no run folder behind
        run = _new_folder(chosen, name, record, folder)

    def train() -> Outcome:
        from palestra.train.run import Run

        with watching() as watcher, asyncio.Runner() as runner:
            built = Run.build(chosen, task(chosen), run, runner=runner, watcher=watcher, loaded=loaded, resume=resumed)
            with hidden_progress_bars():
                return built.train()

    return run, outside_event_loop(train)


def _new_folder(config: RunConfig, name: str, record: Mapping[str, Any], folder: Path | None) -> RunFolder:
    """Make the run folder on the first rank, and use it on all."""
    from palestra.train.ranks import join

    output_dir = Path(config.output_dir)
    run = join(config).from_first(lambda: RunFolder.create(output_dir, name, config, record, at=folder))
    if not run.has_begun:
        raise PalestraError(
            f"{run.path.absolute()}, which rank 0 has made, is not there on this machine; give an output_dir that "
            "all machines share"
        )
    return run


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
    settings = config if isinstance(config, RunConfig) else RunConfig.build(dict(config or {}))
    if settings.stages.traces is None:
        raise PalestraError("there is nothing to learn from; give stages.traces, a file of conversations or a run")
    if settings.stages.plan != "sft":
        raise PalestraError(f"stages.plan = {settings.stages.plan!r} attempts cases; use train_grpo with an agent")

    def task(config: RunConfig) -> Task:
        from palestra.train.tasks import FinishTask

        return FinishTask(None, kind="other")

    return train_task(
        task,
        lambda: settings,
        name=name,
        record={"only_learns_traces": True},
        folder=folder,
        resume=resume,
        watching=lambda: watching(watcher),
    )


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
) -> EvalReport:
    """Score an agent on a suite, without training."""
    refuse_in_import("an evaluation")
    require_suite(suite)
    trainer = GRPOTrainer(agent, measures, config=config, progress=progress, watcher=watcher)
    environment = SuiteEnvironment(trainer.agent, suite, suite, measures, reward_weights)

    def score() -> EvalReport:
        from palestra.policy.build import build_policy
        from palestra.train.setup import suited_to
        from palestra.train.tasks import Parts

        trainer.config.refuse(
            ["backend", "tinker", "ray"], "a model is scored on this machine, unless it is in training"
        )
        loaded = trainer._load(trainer.config)
        config = suited_to(trainer.config, loaded.model)
        policy = build_policy(loaded.model, loaded.tokenizer, config.model.engine, config.model.kv_memory_gib)
        with trainer._watching() as watcher, asyncio.Runner() as runner:
            parts, task = Parts(config, policy, loaded.tokenizer, runner, watcher), trainer._task(environment, config)
            evaluator = task.evaluator(parts)
            assert evaluator is not None
            try:
                return evaluator.run(runner, watcher, "scoring")
            finally:
                if close := getattr(task, "close", None):
                    close(runner)

    with closing(environment):
        return outside_event_loop(score)
