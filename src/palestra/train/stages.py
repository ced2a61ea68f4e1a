"""The stages of a run: one after the other through the same loop, each with a source of groups and settings of its own.

`sft` learns from demonstrations, `rft` from the model's own best attempts (train/rft.py), `grpo` by reinforcement.
Where the run stands is part of its checkpoints: a resumed run goes on in the right stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from palestra.core.config import RunConfig
from palestra.core.config_sections import TrainSection
from palestra.core.conversations import Conversation, read_conversations
from palestra.core.errors import SettingError, UnsupportedError
from palestra.core.run_folder import RunFolder
from palestra.core.types import Rollout
from palestra.evals.report import EvalReport
from palestra.learner.local import LocalLearner
from palestra.models.chat.grammars import GrammarText
from palestra.policy.openai import OpenAIChat, OpenAISettings
from palestra.train.checkpoint import TrainState
from palestra.train.demonstrations import (
    DemonstrationSource,
    DemonstrationStore,
    demonstrations,
    read_run,
    run_conversations,
    steps_for,
)
from palestra.train.group_source import GroupSource
from palestra.train.limits import attempt_limits
from palestra.train.loop import Training
from palestra.train.rft import RftSource
from palestra.train.tasks import EnvironmentTask, Parts, Task, agent_collector, offered_tools, rewards_of
from palestra.train.teacher import teacher_demonstrations

FULL_RATE_FACTOR = 5.0  # the learning rate of demonstrations, as a multiple of that of GRPO
LORA_RATE_FACTOR = 2.0
MAX_STAGE_STEPS = 1_000_000
TEACHER_KEY = "PALESTRA_TEACHER_KEY"
RFT_ATTEMPTS = 4  # groups' worth of attempts at one case
RFT_PASS = 4  # steps' worth of attempts in one pass over the cases


SHARED_SETTINGS = (  # of `train`, that sft and rft also use; the others are those of GRPO's objective
    "max_steps", "epochs", "max_sampled_tokens", "stop_when_solved", "max_rollbacks", "mask_truncated", "max_grad_norm",
    "weight_decay", "adam_beta1", "adam_beta2", "scheduler", "warmup_steps", "expert_routing", "tokens_per_micro_batch",
    "share_prefix", "deterministic",
)  # fmt: skip


@dataclass(slots=True)
class StageResult:
    """The result of one stage; the rates are of held-out cases, None where nothing could be scored."""

    name: str
    first_step: int
    last_step: int
    seconds: float
    sampled_tokens: float
    before: float | None = None
    after: float | None = None

    @property
    def text(self) -> str:
        steps = self.last_step - self.first_step
        gain = "" if self.after is None or self.before is None else f": {self.before:.1%} -> {self.after:.1%}"
        return f"stage {self.name}, {steps} {'step' if steps == 1 else 'steps'}, {self.seconds:.0f} s{gain}"


@dataclass(slots=True)
class Stages:
    """Takes a training from stage to stage. Its initial settings are those of the grpo stage."""

    training: Training
    parts: Parts
    task: Task
    folder: RunFolder
    plan: list[str]
    takes_no_steps: bool = False  # a run that is only scored and saved
    save_model: Callable[[], object] = lambda: None
    results: list[StageResult] = field(default_factory=list)
    store: DemonstrationStore = field(init=False)
    _grpo: tuple[RunConfig, GroupSource, int] = field(init=False)

    def __post_init__(self) -> None:
        training = self.training
        self.store = DemonstrationStore(self.folder.demonstrations_file)
        self._grpo = training.config, training.source, training.total_steps or 0
        if self.plan == ["grpo"]:
            return
        if training.ranks.size > 1:
            raise SettingError("stages other than grpo train in one process; start it without --nproc")
        if training.learner_thread is not None:
            training.config.refuse(["rollout.max_staleness"], "a run with several stages samples and learns in turns")
        if "rft" in self.plan and (not isinstance(self.task, EnvironmentTask) or self.task.rollout_func is not None):
            raise UnsupportedError(
                "an rft stage attempts the cases with our agent loop; agents that are programs, rollout_func and "
                "environments over the wire cannot be attempted with hints. Use sft or grpo"
            )

    def run(
        self, evaluate: Callable[[int], float] | None, lacks_evaluation: bool, score: Callable[[], float | None]
    ) -> None:
        """Run what is left of the plan; `score` gives the held-out pass rate between two stages."""
        training = self.training
        for number in [] if self.takes_no_steps else range(training.state.stage, len(self.plan)):
            if number > training.state.stage or training.state.step == 0:
                self.enter(number)
            training.run(evaluate, lacks_evaluation)
            lacks_evaluation = False
            if self.plan != ["grpo"]:
                self._note_result(number, score)
            if training.ended_early is not None:
                break

    def enter(self, number: int) -> None:
        """Begin a stage: its settings and its source, from the step where the training stands."""
        training, name = self.training, self.plan[number]
        if number == 0 and name != "grpo":
            self.store.cut(0)  # of a run that was killed before its first checkpoint
        self._arrange(number)
        if name == "sft":
            learned = training.demonstrations
            assert learned is not None
            self.store.add(stage_demonstrations(self.task, self.parts, self.folder))
            learned.count = len(self.store) - learned.first
            if not learned.count:
                raise SettingError(
                    "the sft stage has no demonstrations; give stages.traces (a file of conversations, or a run), "
                    "Agent(examples=[…]) or --teacher, or leave sft out of stages.plan"
                )
        if number and isinstance(training.learner, LocalLearner):
            training.learner.optimizer.reset()
        source = training.source.state()
        training.state = replace(training.state, stage=number, stage_start=training.state.step, source=source)
        training.total_steps = training.state.step + self._steps(number)
        if self.plan != ["grpo"]:
            training.watcher.note(f"stage {number + 1} of {len(self.plan)}: {name}")
            if training.ranks.is_first:
                learned = training.demonstrations
                ends_by_itself = learned is not None and learned.ends_by_itself
                self.folder.add_to_record(steps=None if ends_by_itself else training.total_steps)

    def resume(self, folder: Path, state: TrainState) -> None:
        """Go on from a checkpoint, in its stage."""
        self._arrange(state.stage)
        self.training.resume(folder, state)
        self.training.total_steps = state.stage_start + self._steps(state.stage)
        self.results = [StageResult(**result) for result in self.folder.record.get("stages", ())][: state.stage]

    def _arrange(self, number: int) -> None:
        """Give the training the settings and the source of a stage."""
        training, name = self.training, self.plan[number]
        config, training.source, _ = self._grpo
        training.config = stage_config(config, name)
        if name == "sft":
            training.source = DemonstrationSource(self.store, config.seed, first=len(self.store))
        elif name == "rft":
            training.source = self._rft_source()
        if number == len(self.plan) - 1:
            training.save_model = self.save_model

    def _note_result(self, number: int, score: Callable[[], float | None]) -> None:
        """Record what the stage has done. The model is scored here, unless the run ends with this stage."""
        training, first = self.training, self.training.state.stage_start
        rows = [row for row in self.folder.metrics() if row["step"] > first and "elapsed_seconds" in row]
        tokens = sum(row.get("sampled_tokens", 0.0) for row in rows)
        began = rows[0]["elapsed_seconds"] - rows[0]["sample_seconds"] - rows[0]["train_seconds"] if rows else 0.0
        seconds = rows[-1]["elapsed_seconds"] - began if rows else 0.0
        result = StageResult(self.plan[number], first, training.state.step, seconds, tokens)
        self.results = [*self.results[:number], result]
        goes_on = number < len(self.plan) - 1 and training.ended_early is None
        if goes_on and any("loss" in row for row in rows):
            result.after = score()
        self._record()

    def _record(self) -> None:
        if self.plan != ["grpo"]:
            self.folder.add_to_record(stages=[asdict(result) for result in self.results])

    def note_scores(self, before: EvalReport | None, after: EvalReport | None) -> None:
        """Record and show the results with the rates before each stage, and after the last one."""
        if self.results:
            rate = None if before is None else before.pass_rate.rate
            self.results[-1].after = None if after is None else after.pass_rate.rate
            for result in self.results:
                result.before = rate
                rate = result.after = rate if result.after is None else result.after
        self._record()
        for result in self.results:
            self.training.watcher.note(result.text)

    def _rft_source(self) -> RftSource:
        task, parts, config = self.task, self.parts, self._grpo[0]
        assert isinstance(task, EnvironmentTask)
        rewards = rewards_of(task.environment, task.reward_functions, parts)

        takes_grammars = config.has_own_engine and find_spec("llguidance") is not None
        if config.has_own_engine and not takes_grammars and offered_tools(task):
            parts.watcher.note("rft: pip install 'palestra[constrain]' lets attempts with hints be held to tool calls")
        close = parts.chat.closes_reasoning({})
        call = GrammarText(parts.chat.stop_token_ids, one_call=True, close_reasoning=close)

        def collector(environment: Any, temperature: float, forced_calls: int) -> Any:
            hotter = config.with_settings({"rollout.temperature": temperature})
            calls = min(forced_calls, hotter.rollout.max_tool_rounds) if takes_grammars else 0
            own: dict[str, Any] = {"rewards": rewards, "forced_calls": calls, "call": call}
            return agent_collector(environment, parts.policy, parts.chat, hotter, training=True, **own)

        stages = config.stages
        attempts = RFT_ATTEMPTS * config.rollout.group_size
        in_pass = RFT_PASS * config.rollout.group_size * config.train.problems_per_step
        chosen = {"rft_attempts": stages.rft_attempts or attempts, "rft_pass": stages.rft_pass or in_pass}
        return RftSource(
            self.store,
            config.seed,
            first=len(self.store),
            environment=task.environment,
            collector=collector,
            chat=parts.chat,
            settings=stages.model_copy(update=chosen),
            temperature=config.rollout.temperature,
            note=parts.watcher.note,
            on_rollout=lambda rollout: parts.watcher.rollout(),
        )

    def _steps(self, number: int) -> int:
        """Number of steps of a stage, or the maximum if it can end early."""
        source, config = self.training.source, self._grpo[0]
        match self.plan[number]:
            case "grpo":
                return self._grpo[2]
            case "distill":
                return config.stages.distill_steps
            case "sft":
                assert isinstance(source, DemonstrationSource)
                return steps_for(source.count, config.stages.sft_epochs, config.stages.sft_batch)
            case _:
                return MAX_STAGE_STEPS


def stage_config(config: RunConfig, name: str) -> RunConfig:
    """The settings of a stage, from those of GRPO."""
    stages = config.stages
    if name == "grpo":
        return config
    if name == "distill":
        coefficient = config.distill_coefficient or 1.0
        others = dict.fromkeys(("echo.coefficient", "train.entropy_coefficient"), 0.0)
        return config.with_settings({"distill.coefficient": coefficient, "distill.only": True} | others)
    factor = LORA_RATE_FACTOR if config.lora.r else FULL_RATE_FACTOR
    demonstrated = TrainSection(
        **config.train.model_dump(include=set(SHARED_SETTINGS)),
        loss="cross_entropy",
        learning_rate=stages.sft_learning_rate or factor * (config.train.learning_rate or 1e-5),
        problems_per_step=stages.sft_batch,
        full_update_share=0.0,
        importance_correction="none",
    )
    others = {"echo.coefficient": 0.0}
    if config.distill_coefficient:
        others |= {"distill.coefficient": 0.0, "distill.only": False}
    return config.model_copy(update={"train": demonstrated}).with_settings(others)


def stage_names(config: RunConfig, task: Task) -> list[str]:
    """The plan of a run; `auto` begins with demonstrations, if there are any, and lets rft find out if it is needed."""
    stages = config.stages
    if stages.plan != "auto":
        return stages.names
    has_demonstrations = bool(stages.traces or stages.teacher or getattr(task, "examples", ()))
    return [*(["sft"] if has_demonstrations else []), "rft", "grpo"]


def stage_demonstrations(task: Task, parts: Parts, folder: RunFolder) -> list[Rollout]:
    """The demonstrations of an sft stage: the agent's examples, a file or a run, and the answers of a teacher."""
    config, stages = parts.config, parts.config.stages
    conversations: list[Conversation] = list(getattr(task, "examples", ()))
    rollouts: list[Rollout] = []
    if stages.traces is not None:
        path = Path(stages.traces).expanduser()
        if not path.is_dir():
            conversations += read_conversations(path)
        elif RunFolder.open(path).config.model.name == config.model.name:
            rollouts += read_run(RunFolder(path), stages.rft_keep)
        else:
            conversations += run_conversations(RunFolder(path))
    if stages.teacher is not None:
        conversations += _ask_teacher(task, parts, folder)
    schemas = [tool.schema for tool in offered_tools(task)]
    context = parts.policy.context_tokens
    return [*demonstrations(conversations, parts.chat, schemas, max_tokens=context), *rollouts]


def _ask_teacher(task: Task, parts: Parts, folder: RunFolder) -> list[Conversation]:
    config, stages = parts.config, parts.config.stages
    if not isinstance(task, EnvironmentTask):
        raise UnsupportedError("a teacher plays the agent in our agent loop; this agent has a program of its own")
    settings = {"base_url": stages.teacher, "model_name": stages.teacher_model, "api_key_env": TEACHER_KEY}
    problems = task.environment.problems("train")[: stages.teacher_cases]
    parts.watcher.phase("asking the teacher", len(problems))
    answers = teacher_demonstrations(
        task.environment,
        problems,
        OpenAIChat(OpenAISettings.read(settings)),
        attempt_limits(config, training=True),
        attempts=stages.teacher_attempts,
        seed=config.seed,
        file=folder.teacher_file,
        rewards=rewards_of(task.environment, task.reward_functions, parts),
    )
    conversations, cost = parts.runner.run(answers)
    folder.add_to_record(teacher=asdict(cost))
    parts.watcher.note(
        f"the teacher solved {cost.solved} of {cost.solved + cost.unsolved} cases in {cost.attempts} attempts: "
        f"{cost.requests} requests, {cost.prompt_tokens:,} prompt and {cost.completion_tokens:,} completion tokens"
    )
    return conversations
