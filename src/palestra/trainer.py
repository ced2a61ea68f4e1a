"""`GRPOTrainer`: builds a run from an agent, or from TRL's arguments, and trains it in a run folder."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.agents.agent import agent_examples
from palestra.agents.openai_agents import as_agent
from palestra.agents.programs import ProgramAgent
from palestra.core.config import RunConfig
from palestra.core.errors import NotFoundError, SettingError, needs_extra, refuse_arguments
from palestra.core.extras import provided
from palestra.core.files import refuse_in_import
from palestra.core.grpo_config import GRPOTrainingConfig
from palestra.core.ranks import join
from palestra.core.run_folder import Resume, RunFolder
from palestra.core.time_limit import outside_event_loop
from palestra.envs.base import Environment
from palestra.envs.running import RunningEnv
from palestra.envs.suite_env import FactoryEnv, SuiteEnvironment, owns_reward
from palestra.evals.suite import EvalSuite, hold_out
from palestra.models.names import hidden_progress_bars, is_local
from palestra.result import GRPOTrainingResult
from palestra.rollout.rewards import RewardFunctionList, TrainerState, as_list
from palestra.runs.index import listed_early
from palestra.train.watcher import Watcher

if TYPE_CHECKING:
    from palestra.models.loading import LoadedModel
    from palestra.train.run import Outcome
    from palestra.train.tasks import Task

Config = GRPOTrainingConfig | RunConfig | Mapping[str, Any] | None

# Arguments of TRL's GRPOTrainer, and where they go here.
TRL_NAMES = {
    "model": "agent", "tools": "agent", "reward_funcs": "extra_reward_funcs", "args": "config", "peft_config": "config",
    "train_dataset": "suite", "eval_dataset": "held_out", "callbacks": "watcher",
}  # fmt: skip


class GRPOTrainer:
    """The same in two steps: build, then `.train(suite)`; `.model` and `.tokenizer` are there in between.

    It also takes the arguments of TRL's GRPOTrainer instead of an agent: `GRPOTrainer(model=…, reward_funcs=…,
    train_dataset=…, args=GRPOConfig(…))`, then `.train()`; docs/python.md has what is taken.
    """

    def __init__(
        self,
        agent: Any = None,
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
        progress: bool = True,
        watcher: Watcher | None = None,
        name: str | None = None,
        source: str | None = None,
        folder: Path | str | None = None,
        **trl: Any,
    ) -> None:
        self._trl: Any = None
        self.args: Any = trl.get("args", config)  # the config as it was given
        if agent is None:
            own = {"config": config, "extra_reward_funcs": extra_reward_funcs, "reward_measures": reward_measures}
            self._trl = _read_trl(trl, own, has_environment=environment_factory is not None)
            agent, config, extra_reward_funcs = self._trl.agent, self._trl.config, self._trl.reward_functions
        elif trl:
            refuse_arguments("GRPOTrainer", trl, TRAINER_ARGUMENTS, TRL_NAMES)
        self.agent = as_agent(agent)
        self.model_name = self.agent.required_model
        self.reward_measures = reward_measures
        self.reward_weights = reward_weights
        self.torch_dtype = torch_dtype
        self.device_map = device_map
        self.environment_factory = environment_factory
        self.extra_reward_funcs = as_list(extra_reward_funcs)
        self.rollout_func = rollout_func
        self.advantages, self.loss = advantages, loss  # functions in the place of the built-in ones
        self._config = config
        self._progress = progress
        self._watcher = watcher
        self._name = name or self.agent.name
        self._source = source
        self._folder = None if folder is None else Path(folder)
        self._loaded: Any = None
        self._run: RunFolder | None = None  # of the last training, also while it goes on
        self._result: GRPOTrainingResult | None = None

    @property
    def model(self) -> Any:
        """The model; after a training the trained one."""
        return self._load(self.config).model if self._result is None else self._result.model

    @property
    def tokenizer(self) -> Any:
        return self._load(self.config).tokenizer

    @property
    def processing_class(self) -> Any:
        """The tokenizer, by TRL's name."""
        return self.tokenizer

    @property
    def tools(self) -> Sequence[Any]:
        return self.agent.tools

    @property
    def instructions(self) -> Any:
        return self.agent.instructions

    @property
    def config(self) -> RunConfig:
        """All settings; `args` is the config as it was given."""
        return self._resolve(None)

    @property
    def state(self) -> TrainerState:
        """How far the training is, and its metrics, a row a step, as TRL's `trainer.state`."""
        rows = [] if self._run is None else self._run.metrics()
        return TrainerState.of(rows, 0 if self._run is None else int(self._run.record.get("steps") or 0))

    def save_model(self, output_dir: Path | str | None = None) -> Path:
        """Save the model and the tokenizer; without a folder in the config's output_dir."""
        folder = Path(output_dir or self.config.output_dir)
        if self._result is not None:
            return self._result.save_model(folder)
        from palestra.models.export.hf import save_hf

        return save_hf(self.model, self.tokenizer, folder)

    def _resolve(self, problems: int | None) -> RunConfig:
        chosen = {"model.name": self.model_name, "model.dtype": self.torch_dtype, "model.device": self.device_map}
        overrides = {key: value for key, value in chosen.items() if value is not None}
        match self._config:
            case GRPOTrainingConfig():
                config = self._config.to_run_config(problems)
            case RunConfig():
                config = self._config
            case Mapping() | None:
                return RunConfig.build(self._config or {}, overrides)
            case other:
                kind = type(other).__name__
                raise SettingError(f"config is of type {kind}; expected a dict of settings or a GRPOTrainingConfig")
        changes = {key: value for key, value in overrides.items() if config.value(key) != value}
        return config.with_settings(changes) if changes else config

    def _load(self, config: RunConfig, *, training: bool = True) -> Any:
        if self._loaded is None:
            load = partial(load_quietly, config, training=training)
            own = self._trl
            self._loaded = load() if own is None else own.loaded(load, config.model.chat_template_kwargs)
        return self._loaded

    def train(
        self,
        suite: EvalSuite | None = None,
        *,
        held_out: EvalSuite | float | None = 0.2,
        resume: Path | str | Resume | None = None,
        record: Mapping[str, Any] | None = None,
        resume_from_checkpoint: Path | str | bool | None = None,
    ) -> GRPOTrainingResult:
        """Evaluate, train, evaluate again; everything is recorded in a run folder.

        With TRL's arguments the suite is train_dataset, and eval_dataset is held out; without one nothing is scored
        before and after. `resume_from_checkpoint` is TRL's name for `resume`.
        """
        if suite is None:
            if self._trl is None:
                raise SettingError("there is nothing to train on; give a suite: trainer.train(suite)")
            suite, held_out = self._trl.train, self._trl.held_out
        if resume_from_checkpoint is True:
            raise SettingError("resume_from_checkpoint=True: name the run's folder, for example 'runs/clerk-20260131'")
        resume = resume or resume_from_checkpoint or None
        train_suite, held = hold_out(suite, held_out)
        factory = self.environment_factory
        scored_elsewhere = bool(self.extra_reward_funcs) or (factory is not None and owns_reward(factory))
        if isinstance(self.agent, ProgramAgent):
            scored_elsewhere |= self.agent.posts_reward
        cases = SuiteEnvironment(
            self.agent,
            train_suite,
            held,
            self.reward_measures,
            self.reward_weights,
            measures_required=not scored_elsewhere,
        )
        with closing(cases):
            if factory is None:
                return self.train_on(cases, resume=resume, record=record)
            environment = RunningEnv(FactoryEnv(factory, cases, self.agent.fixed_instructions))
            return self.train_on(environment, resume=resume, record=record)

    def train_on(
        self,
        environment: Environment,
        *,
        record: Mapping[str, Any] | None = None,
        resume: Path | str | Resume | None = None,
    ) -> GRPOTrainingResult:
        """The same on any environment, which gives problems, tools and scores; `record` is more for run.json."""
        about = {
            "source": self._source,
            "agent": self.agent.name,
            "instructions": self.agent.instructions,
            "tools": [tool.schema for tool in self.agent.tools],
        }
        run, outcome = self.train_task(
            lambda config: self._task(environment, config),
            about | dict(record or {}),
            resume,
            lambda: len(environment.problems("train")),
        )
        self._result = GRPOTrainingResult(self.agent, run, outcome, self)
        return self._result

    def train_task(
        self,
        task: Callable[[RunConfig], Task],
        record: Mapping[str, Any],
        resume: Path | str | Resume | None = None,
        problems: Callable[[], int | None] = lambda: None,
    ) -> tuple[RunFolder, Outcome]:
        """Train in a new run folder with this record, or continue a run. `problems`: how many there are, if known."""
        from palestra.train.credit import CustomObjective
        from palestra.train.tasks import EnvironmentTask

        refuse_in_import("a training")
        resumed = Resume.of(resume)
        self._loaded = None if resumed is not None else self._loaded  # a resumed run loads the published weights
        run = None if resumed is None else RunFolder.open(resumed.folder)
        config = self._resolve(problems()) if run is None else run.config
        objective = CustomObjective.of(config.train, self.advantages, self.loss)  # before the model is loaded
        what = task(config)
        with ExitStack() as stack:
            if isinstance(what, EnvironmentTask):
                stack.callback(what.close_workers)
                what.start_workers(config)
            loaded = self._load(config)  # a model that cannot be loaded leaves no run folder behind
            if run is None:
                ranks, output_dir = join(config), Path(config.output_dir)
                create = partial(RunFolder.create, output_dir, self._name, config, record, at=self._folder)
                run = ranks.from_first(create, RunFolder)
                if not run.has_begun:
                    raise NotFoundError(
                        f"{run.path.absolute()}, which rank 0 has made, is not there on this machine; give an "
                        "output_dir that all machines share"
                    )
            self._run = run
            parts = {"loaded": loaded, "resume": resumed, "objective": objective}
            return run, outside_event_loop(partial(self._train, config, what, run, **parts))

    def _train(
        self, config: RunConfig, task: Task, folder: RunFolder, *, resume: Resume | None, **parts: Any
    ) -> Outcome:
        from palestra.train.run import Run

        with (
            self._watching() as watcher,
            asyncio.Runner() as runner,
            listed_early(folder.path, resume, watcher.ends_at_start),
        ):
            run = Run.build(config, task, folder, runner=runner, watcher=watcher, resume=resume, **parts)
            with hidden_progress_bars():
                return run.train()

    def _task(self, environment: Environment, config: RunConfig) -> Task:
        """What is trained on: our agent loop in an environment, or a program at the gateway."""
        from palestra.train.tasks import OWN_LOOP, EnvironmentTask

        if not isinstance(self.agent, ProgramAgent):
            rewards, examples = self.extra_reward_funcs, agent_examples(self.agent)
            scored = self._trl is None or bool(environment.problems("held_out"))
            return EnvironmentTask(environment, rewards, self.rollout_func, self, examples, scored=scored)
        if self.rollout_func is not None or not isinstance(environment, SuiteEnvironment):
            raise SettingError(
                f"{self.agent.name} is a program with a loop of its own; train it on a suite, without rollout_func and "
                "environment_factory"
            )
        config.refuse(OWN_LOOP, "the agent's program keeps its history itself")
        with needs_extra("training a program", "serve"):
            from palestra.sources.programs.task import ProgramTask
        return ProgramTask(environment, self.agent, self._load(config), self.extra_reward_funcs)

    def _watching(self) -> AbstractContextManager[Watcher]:
        """The given watcher, else a progress display, else a watcher that shows nothing."""
        if self._watcher is not None or not self._progress:
            return nullcontext(self._watcher or Watcher())
        from palestra.train.progress import console_progress

        return console_progress()


TRAINER_ARGUMENTS = [name for name in signature(GRPOTrainer.__init__).parameters if name not in ("self", "trl")]


def _read_trl(trl: Mapping[str, Any], own: Mapping[str, Any], *, has_environment: bool) -> Any:
    """TRL's arguments, which cannot be mixed with those that stand for the same here."""
    if not trl:
        raise SettingError("GRPOTrainer needs an agent, or a model, reward_funcs and train_dataset as in TRL")
    if mixed := [name for name, value in own.items() if value is not None]:
        raise SettingError(f"{', '.join(mixed)}: leave it out; TRL's args and reward_funcs stand for it")
    return provided("arguments of TRL")(trl, TRAINER_ARGUMENTS, has_environment=has_environment)


def load_quietly(config: RunConfig, *, training: bool = True) -> LoadedModel:
    """Load the model of a run; a progress bar shows only downloads."""
    from palestra.train.setup import load_for_run

    with hidden_progress_bars() if is_local(config.model.name) else nullcontext():
        return load_for_run(config, training=training)
