"""GRPO by hand: any Hugging Face model and tokenizer, a reward, and one method for each part of a step."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypedDict

from palestra.algo.advantage import advantages as normalise
from palestra.core.config import RunConfig, read_yaml_config
from palestra.core.config_sections import STEP_PROBLEMS
from palestra.core.errors import InputError, ServiceError, SettingError
from palestra.core.event_loop import outside_event_loop
from palestra.core.files import write_json
from palestra.core.grpo_config import GRPOTrainingConfig
from palestra.core.ranks import refuse_ranks
from palestra.core.run_folder import RunFolder
from palestra.core.types import Group, Problem, Rollout, Turn
from palestra.learner.local import LocalLearner
from palestra.learner.optimizer import UserOptimizer
from palestra.models.export.hf import save_hf
from palestra.models.loading import LoadedModel, use_softcaps
from palestra.policy.build import policy_of
from palestra.rollout.collect import Collector, require_one_good
from palestra.runs.tracking.base import Trackers
from palestra.train.checkpoint import TrainState
from palestra.train.credit import CustomObjective, assign_credit
from palestra.train.group_source import ProblemSource, StepRollouts
from palestra.train.loop import Training
from palestra.train.progress import console_progress
from palestra.train.prompts import (
    Prompt,
    PromptEnvironment,
    PromptTask,
    Reward,
    as_input,
    as_problem,
    prompt_collector,
    reward_function,
    stop_token_ids,
)
from palestra.train.run import Run
from palestra.train.schedule import total_steps
from palestra.train.setup import load_for_run, suited_to, with_adapter
from palestra.train.tasks import OWN_LOOP

log = logging.getLogger("palestra")
DEFAULT_CONFIG = Path("config/config.yaml")
# Attributes by the names of other trainers, and the settings that they are.
_ATTRIBUTES = {
    "batch_size": "train.problems_per_step",
    "learning_rate": "train.learning_rate",
    "num_epochs": "train.epochs",
    "max_steps": "train.max_steps",
    "num_generations": "rollout.group_size",
    "max_new_tokens": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
}


class Output(str):
    """One sampled answer, with the tokens that it is trained as; and its reward, where a reference was given."""

    prompt_ids: tuple[int, ...]
    sampled: Turn
    reward: float | None

    @classmethod
    def of(cls, rollout: Rollout, *, scored: bool) -> Output:
        output = cls(rollout.messages[-1].text)
        output.prompt_ids, output.sampled = tuple(rollout.turns[0].token_ids.tolist()), rollout.turns[1]
        output.reward = rollout.reward if scored else None
        return output

    @property
    def text(self) -> str:
        return str(self)


class History(TypedDict):
    """What `StepTrainer.train` gives: one entry a step."""

    loss: list[float]
    reward: list[float]
    steps: int
    rows: list[dict[str, float]]  # all metrics


class StepTrainer:
    """Trains `model` in place, whole or by its PEFT adapter, one optimizer step at a time.

    >>> trainer = StepTrainer(model, tokenizer, lambda output, expected: float(expected in output))  # doctest: +SKIP
    >>> trainer.train_step("2 + 2 = ", "4")["rewards"]
    [0.0, 1.0, 0.0, 0.0]
    >>> history = trainer.train([{"prompt": "2 + 2 = ", "expected_answer": "4"}, ...])

    A prompt is text, taken as it is, or chat messages, put through the tokenizer's chat template.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        reward_model: Reward,
        config: RunConfig | GRPOTrainingConfig | Path | str | None = None,
        output_dir: Path | str | None = None,
        *,
        config_path: Path | str | None = None,
        advantages: Any = None,
        loss: Any = None,
    ) -> None:
        """`config` is an object, or the path of a YAML file like `config_path`; without one config/config.yaml, if
        there is one. `output_dir` becomes the run folder. `advantages` and `loss` are functions in the place of the
        built-in ones (docs/objectives.md).
        """
        refuse_ranks("StepTrainer", "use train_grpo, or start it without torchrun")
        if config is not None and config_path is not None:
            raise SettingError("config and config_path are one setting; give one of them")
        settings = _resolve(config if config_path is None else config_path)
        self.config = suited_to(settings, model, max_problems=STEP_PROBLEMS)  # a dataset may have few rows
        run_name = self.config.track.run_name or f"step-trainer-{time.strftime('%Y%m%d-%H%M%S')}"
        self.objective = CustomObjective.of(self.config.train, advantages, loss)
        self.folder = Path(output_dir) if output_dir is not None else Path(self.config.output_dir) / run_name
        use_softcaps(model)
        self.model = with_adapter(model, self.config).eval()  # dropout is for the learner alone, which switches it on
        self.tokenizer = tokenizer
        self.epoch = 0.0  # passes over the dataset of `train`
        self.reward_model = reward_model
        self._reward = reward_function(reward_model)
        options = self.config.model
        self._optimizer = UserOptimizer(self.model, self.config.train, master_weights=options.master_weights)
        self._learner = LocalLearner(self.model, config=self.config, optimizer=self._optimizer)
        records = self.config.train.expert_routing != "own"
        self._policy = policy_of(self.model, tokenizer, options, record_routing=records)
        self._state = TrainState()
        self._run_folder: RunFolder | None = None  # made by the first `train`

    @classmethod
    def from_yaml(
        cls, path: Path | str, reward_model: Reward, output_dir: Path | str | None = None, **functions: Any
    ) -> StepTrainer:
        """The model and the settings of one YAML file."""
        config = _resolve(path)
        loaded = load_for_run(config)
        return cls(loaded.model, loaded.tokenizer, reward_model, config, output_dir, **functions)

    def __getattr__(self, name: str) -> Any:
        """Settings by the names of other trainers: `trainer.num_generations`."""
        if name not in _ATTRIBUTES:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self.config.value(_ATTRIBUTES[name])

    @property
    def output_dir(self) -> Path:
        return self.folder

    @property
    def wandb_enabled(self) -> bool:
        return "wandb" in self.config.track.report_to

    @property
    def step(self) -> int:
        return self._state.step

    def generate_group_outputs(self, prompt: Prompt, reference_output: Any = None) -> list[Output]:
        """`rollout.group_size` answers to one prompt, scored where there is a reference to compare them with."""
        scored = reference_output is not None
        problem = Problem(str(self.step), as_input(prompt), reference_output)
        [group] = self._sample(self._collector([problem], self._reward if scored else None), [problem])
        if failed := next((r.error for r in group.rollouts if r.error is not None), None):
            raise ServiceError(failed)
        return [Output.of(rollout, scored=scored) for rollout in group.rollouts]

    def calculate_advantages(self, rewards: Sequence[float], group: Sequence[int] | None = None) -> list[float]:
        """How much better than its siblings each answer was: (r − mean) / std unless the config says otherwise.

        All rewards are of one group, unless `group` says which group each belongs to.
        """
        train = self.config.train
        members = list(group) if group is not None else [0] * len(rewards)
        return normalise(
            list(rewards), members, scale=train.advantage_scale, leave_one_out=train.leave_one_out
        ).tolist()

    def train_step(
        self, prompt: Prompt, expected_answer: Any = None, optimizer: Any | None = None, scheduler: Any | None = None
    ) -> dict[str, Any]:
        """One optimizer step on one prompt: sample a group, reward it, learn.

        The step is that of `optimizer` from the first call with one; without, AdamW by the config. It is made here:
        an `optimizer.step()` after it finds no gradients. Gives the step's metrics, the `rewards` and `advantages` of
        the answers, and their `weighted_loss`.
        """
        if optimizer is not None or scheduler is not None:
            self._optimizer.use(optimizer, scheduler)
        return self.train_batch([Problem(str(self.step), as_input(prompt), expected_answer)])

    def train_batch(self, problems: Sequence[Problem]) -> dict[str, Any]:
        """One optimizer step on several prompts."""
        began = time.perf_counter()
        collector = self._collector(problems, self._reward)
        groups = self._sample(collector, problems)
        require_one_good(groups)
        drawn = int(self._state.source.get("cursor", 0)) + len(problems)
        source = ProblemSource(collector, problems, {}, self.config.rollout.group_size, self.config.seed, drawn)
        training = Training(
            self.config,
            source,
            self._policy,
            self._learner,
            Trackers(()),
            total_steps=None,
            state=self._state,
            objective=self.objective,
        )
        credit = assign_credit(groups, self.config.train, {}, self.objective.advantages)
        advantages = credit.advantages
        metrics = training.learn(StepRollouts(credit.groups, advantages, 0, time.perf_counter() - began))
        self._state = training.state
        return self._report(metrics) | {
            "rewards": [reward for group in groups for reward in group.rewards],
            "advantages": [advantage for row in advantages for advantage in row],
            "weighted_loss": metrics.get("policy_loss", 0.0),
        }

    def train(self, dataset: Iterable[Any], optimizer: Any | None = None, scheduler: Any | None = None) -> History:
        """Train to `train.max_steps`, or for `train.epochs` passes; gives every step's loss, reward and metrics.

        A row has `prompt` and `expected_answer` (or `answer`), or is a pair of the two. The run's files, checkpoints
        and the `final` model are written to `folder`. Without an optimizer, AdamW by the config; a scheduler moves on
        with every step, also one that has nothing to learn.
        """
        problems = [as_problem(i, row) for i, row in enumerate(dataset)]
        if not problems:
            raise InputError("the dataset is empty; give it at least one row with a prompt")
        if optimizer is not None or scheduler is not None:
            self._optimizer.use(optimizer, scheduler)
        first = self.step
        last = first + total_steps(self.config, len(problems))
        rows: list[dict[str, float]] = []

        def work() -> None:
            def on_step(step: int, metrics: dict[str, float]) -> dict[str, float]:
                self._state = run.training.state
                self.epoch = (step - first) * self.config.train.problems_per_step / len(problems)
                rows.append(self._report(metrics))
                if (every := self.config.checkpoint.every) and step % every == 0:
                    self.save_checkpoint(f"checkpoint-{step}")
                return rows[-1]

            with asyncio.Runner() as runner, console_progress(on_step=on_step) as progress:
                run = Run.build(
                    self.config,
                    PromptTask(problems, self._reward, self.tokenizer, self._stops),
                    self._open_folder(),
                    runner=runner,
                    watcher=progress,
                    loaded=LoadedModel(self.model, self.tokenizer, type(self.model).__name__, ""),
                    policy=self._policy,
                    learner=self._learner,
                    state=self._at_first_of(problems),
                    steps=last,
                    keeps_checkpoints=False,
                    objective=self.objective,
                )
                try:
                    run.train()
                finally:
                    self._state = run.training.state

        outside_event_loop(work)
        self.save_checkpoint("final")
        rewards = [row.get("reward_mean", math.nan) for row in rows]
        return {"loss": [row["loss"] for row in rows], "reward": rewards, "steps": len(rows), "rows": rows}

    def save_checkpoint(self, name: str) -> Path:
        """The model (its adapter, where it has one), the tokenizer and training_config.json."""
        folder = save_hf(self.model, self.tokenizer, self.folder / name)
        names = ("learning_rate", "batch_size", "num_epochs", "max_steps", "num_generations", "step")
        settings = {name: getattr(self, name) for name in names}
        write_json(folder / "training_config.json", settings | {"timestamp": time.strftime("%Y-%m-%dT%H:%M:%S%z")})
        return folder

    @property
    def _stops(self) -> tuple[int, ...]:
        return stop_token_ids(self.model, self.tokenizer)

    def _collector(self, problems: Sequence[Problem], reward: Any) -> Collector:
        environment = PromptEnvironment(tuple(problems), reward)
        return prompt_collector(environment, self._policy, self.tokenizer, self.config, self._stops)

    def _open_folder(self) -> RunFolder:
        if self._run_folder is None:
            record = {"agent": "step trainer", "tools": []}
            name = self.folder.name
            self._run_folder = RunFolder.create(self.folder.parent, name, self.config, record, at=self.folder)
        return self._run_folder

    def _at_first_of(self, problems: Sequence[Problem]) -> TrainState:
        """Where the trainer stands, with the next draw at the first problem of a pass over them."""
        drawn = int(self._state.source.get("cursor", 0))
        return replace(self._state, source={"cursor": -(-drawn // len(problems)) * len(problems)})

    def _sample(self, collector: Collector, problems: Sequence[Problem]) -> list[Group]:
        drawn = int(self._state.source.get("cursor", 0))
        keys = [f"{self.config.seed}/{drawn + i}" for i in range(len(problems))]
        size = self.config.rollout.group_size
        return outside_event_loop(lambda: asyncio.run(collector.collect(problems, size, keys)))

    def _report(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics of a step, with the user's scheduler's values; warns of a step without tokens to train."""
        if metrics.get("truncation_rate") == 1.0 and self.config.train.mask_truncated:
            log.warning(
                "step %d: every answer was cut off at max_new_tokens=%d, so nothing was learned; "
                "raise rollout.max_new_tokens or set train.mask_truncated to false",
                self.step,
                self.config.rollout.max_new_tokens,
            )
        return {"loss": 0.0, **metrics, **self._optimizer.after_step(), "step": float(self.step), "epoch": self.epoch}


def _resolve(config: RunConfig | GRPOTrainingConfig | Path | str | None) -> RunConfig:
    """The settings, without those that would have no effect here."""
    match config:
        case GRPOTrainingConfig():
            config = config.to_run_config()
        case Path() | str():
            config = RunConfig().with_settings(read_yaml_config(Path(config)))
        case None if DEFAULT_CONFIG.is_file():
            log.warning("the settings are those of %s; pass config=RunConfig() for the defaults", DEFAULT_CONFIG)
            config = RunConfig().with_settings(read_yaml_config(DEFAULT_CONFIG))
        case None:
            config = RunConfig()
    if config.train.epochs is None:
        config = config.with_settings({"train.epochs": 1})
    config.refuse(["backend", "tinker", "ray"], "StepTrainer trains the model that it is given")
    of_tools = ["echo", "rollout.constrain_tool_calls", "rollout.unexpected_call_format"]
    config.refuse(of_tools, "StepTrainer samples without tools")
    config.refuse(OWN_LOOP, "StepTrainer samples one turn")
    config.refuse(["distill"], "StepTrainer has no teacher")
    config.refuse(["eval.every"], "StepTrainer trains on all prompts and holds none out")
    config.refuse(["rollout.policy_url", "rollout.weights_folder", "vllm"], "StepTrainer samples with our own engine")
    config.refuse(["rollout.max_staleness"], "StepTrainer samples and learns in turns")
    config.refuse(["checkpoint.keep_last", "checkpoint.keep_best"], "StepTrainer keeps every checkpoint")
    once = ["train.refill_limit", "train.signal_share", "train.sampling", "train.sampling_half_life"]
    config.refuse(once, "StepTrainer has every prompt once in a pass")
    if "wandb" in config.track.report_to and find_spec("wandb") is None:
        log.warning("wandb is not installed, so nothing is reported to it; pip install 'palestra[wandb]'")
        others = [name for name in config.track.report_to if name != "wandb"]
        config = config.with_settings({"track.report_to": others})
    return config
