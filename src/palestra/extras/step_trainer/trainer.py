"""GRPO step by step over a `Training`: any Hugging Face model and tokenizer, and a reward."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypedDict

from palestra.algo.advantage import advantages as normalise
from palestra.core.config import RunConfig, read_yaml_config
from palestra.core.config_sections import STEP_PROBLEMS
from palestra.core.errors import InputError, ServiceError, SettingError
from palestra.core.files import write_json
from palestra.core.grpo_config import GRPOTrainingConfig
from palestra.core.ranks import refuse_ranks
from palestra.core.run_folder import RunFolder
from palestra.core.time_limit import outside_event_loop
from palestra.core.types import Group, Problem, Turn
from palestra.extras.step_trainer.prompts import (
    Prompt,
    PromptTask,
    Reward,
    as_input,
    as_problem,
    reward_function,
    stop_token_ids,
)
from palestra.learner.local import LocalLearner
from palestra.learner.optimizer import UserOptimizer
from palestra.models.export.hf import save_hf
from palestra.models.loading import LoadedModel, use_softcaps
from palestra.policy.build import policy_of
from palestra.rollout.collect import require_one_good
from palestra.runs.tracking import Tracker
from palestra.train.credit import CustomObjective
from palestra.train.group_source import NoMoreGroups, StepRollouts, assign_credit
from palestra.train.loop import Training
from palestra.train.progress import console_progress
from palestra.train.run import Run
from palestra.train.setup import load_for_run, suited_to, with_adapter
from palestra.train.tasks import OWN_LOOP
from palestra.train.update import total_steps

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


# Settings that have no effect in a StepTrainer, by the reason.
_WITHOUT_EFFECT = {
    "trains the model that it is given": ["backend", "tinker", "ray"],
    "samples without tools": ["echo", "rollout.constrain_tool_calls", "rollout.unexpected_call_format"],
    "samples one turn": OWN_LOOP,
    "has no teacher": ["distill"],
    "trains on all prompts and holds none out": ["eval.every"],
    "samples with our own engine": ["rollout.policy_url", "rollout.weights_folder", "vllm"],
    "samples and learns in turns": ["rollout.max_staleness"],
    "keeps every checkpoint": ["checkpoint.keep_last", "checkpoint.keep_best"],
    "has every prompt once in a pass": [
        "train.refill_limit", "train.signal_share", "train.sampling", "train.sampling_half_life",
    ],
}  # fmt: skip


class Output(str):
    """One sampled answer with its tokens; `reward` is None without a reference."""

    prompt_ids: tuple[int, ...]
    sampled: Turn
    reward: float | None

    @property
    def text(self) -> str:
        return str(self)


class History(TypedDict):
    """The result of `StepTrainer.train`, with one entry for each step."""

    loss: list[float]
    reward: list[float]
    steps: int
    rows: list[dict[str, float]]  # all metrics


class StepTrainer:
    """Trains `model` in place, all weights or a PEFT adapter, one optimizer step at a time.

    >>> trainer = StepTrainer(model, tokenizer, lambda output, expected: float(expected in output))  # doctest: +SKIP
    >>> trainer.train_step("2 + 2 = ", "4")["rewards"]
    [0.0, 1.0, 0.0, 0.0]
    >>> history = trainer.train([{"prompt": "2 + 2 = ", "expected_answer": "4"}, ...])

    A prompt is a text, used unchanged, or chat messages, rendered with the tokenizer's chat template.
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
        """`config` is an object, or the path of a YAML file like `config_path`; the default is config/config.yaml, if
        it exists. `output_dir` becomes the run folder. `advantages` and `loss` replace the built-in functions
        (docs/objectives.md).
        """
        refuse_ranks("StepTrainer", "use train_grpo, or start it without torchrun")
        if config is not None and config_path is not None:
            raise SettingError("config and config_path are one setting; give one of them")
        settings = _resolve(config if config_path is None else config_path)
        self.config = suited_to(settings, model, max_problems=STEP_PROBLEMS)  # a dataset may have few rows
        run_name = self.config.track.run_name or f"step-trainer-{time.strftime('%Y%m%d-%H%M%S')}"
        self.folder = Path(output_dir) if output_dir is not None else Path(self.config.output_dir) / run_name
        self.output_dir, self.wandb_enabled = self.folder, "wandb" in self.config.track.report_to
        self.objective = CustomObjective.of(self.config.train, advantages, loss)
        use_softcaps(model)
        self.model = with_adapter(model, self.config).eval()  # the learner alone switches dropout on
        self.tokenizer = tokenizer
        self.epoch = 0.0  # passes over the dataset of `train`
        self.reward_model = reward_model
        self._reward = reward_function(reward_model)
        self._stops = stop_token_ids(self.model, tokenizer)
        self._run_folder: RunFolder | None = None  # made by the first `train`
        options = self.config.model
        self._optimizer = UserOptimizer(self.model, self.config.train, master_weights=options.master_weights)
        self._learner = LocalLearner(self.model, config=self.config, optimizer=self._optimizer)
        routed = self.config.train.expert_routing != "own"
        self._source = NoMoreGroups()
        self._training = Training(
            self.config,
            self._source,
            policy_of(self.model, tokenizer, options, record_routing=routed),
            self._learner,
            Tracker(),
            total_steps=None,
            objective=self.objective,
        )

    @classmethod
    def from_yaml(
        cls, path: Path | str, reward_model: Reward, output_dir: Path | str | None = None, **functions: Any
    ) -> StepTrainer:
        """Load the model and the settings of one YAML file."""
        config = _resolve(path)
        loaded = load_for_run(config)
        return cls(loaded.model, loaded.tokenizer, reward_model, config, output_dir, **functions)

    def __getattr__(self, name: str) -> Any:
        """Settings by the names of other trainers: `trainer.num_generations`."""
        if name not in _ATTRIBUTES:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return self.config.value(_ATTRIBUTES[name])

    @property
    def step(self) -> int:
        return self._training.state.step

    def generate_group_outputs(self, prompt: Prompt, reference_output: Any = None) -> list[Output]:
        """`rollout.group_size` answers to one prompt, scored if there is a reference to compare them with."""
        scored = reference_output is not None
        [group] = self._sample([Problem(str(self.step), as_input(prompt), reference_output)], scored=scored)
        outputs = []
        for rollout in group.rollouts:
            if rollout.error is not None:
                raise ServiceError(rollout.error)
            output = Output(rollout.messages[-1].text)
            output.prompt_ids, output.sampled = tuple(rollout.turns[0].token_ids.tolist()), rollout.turns[1]
            output.reward = rollout.reward if scored else None
            outputs.append(output)
        return outputs

    def calculate_advantages(self, rewards: Sequence[float], group: Sequence[int] | None = None) -> list[float]:
        """How much better than its siblings each answer is: (r − mean) / std, or by `train.advantage_scale`.

        All rewards belong to one group, unless `group` has the group of each.
        """
        train = self.config.train
        members = list(group) if group is not None else [0] * len(rewards)
        scaled = normalise(list(rewards), members, scale=train.advantage_scale, leave_one_out=train.leave_one_out)
        return scaled.tolist()

    def train_step(
        self, prompt: Prompt, expected_answer: Any = None, optimizer: Any | None = None, scheduler: Any | None = None
    ) -> dict[str, Any]:
        """One optimizer step on one prompt: sample a group, reward it, learn.

        The step is made here, by `optimizer` from the first call with one, by AdamW before: a later `optimizer.step()`
        has no gradients. Returns the step's metrics with the `rewards` and `advantages` of the answers and their
        `weighted_loss`.
        """
        self._optimizer.use(optimizer, scheduler)
        self._optimizer.warn_of_other_optimizers()
        return self.train_batch([Problem(str(self.step), as_input(prompt), expected_answer)])

    def train_batch(self, problems: Sequence[Problem]) -> dict[str, Any]:
        """One optimizer step on several prompts."""
        began = time.perf_counter()
        groups = self._sample(problems)
        require_one_good(groups)
        self._source.position = {"cursor": self._drawn + len(problems)}
        credit = assign_credit(groups, self.config.train, {}, self.objective.advantages)
        rollouts = StepRollouts(credit.groups, credit.advantages, 0, time.perf_counter() - began)
        metrics = self._training.learn(rollouts)
        return self._report(metrics) | {
            "rewards": [reward for group in groups for reward in group.rewards],
            "advantages": [advantage for row in credit.advantages for advantage in row],
            "weighted_loss": metrics.get("policy_loss", 0.0),
        }

    def train(self, dataset: Iterable[Any], optimizer: Any | None = None, scheduler: Any | None = None) -> History:
        """Train to `train.max_steps`, or for `train.epochs` passes.

        A row has `prompt` and `expected_answer` (or `answer`), or is a pair of the two. The run's files, checkpoints
        and the `final` model are written to `folder`. The default optimizer is AdamW by the config; a scheduler is
        stepped after every step, also one that has nothing to learn.
        """
        problems = [as_problem(i, row) for i, row in enumerate(dataset)]
        if not problems:
            raise InputError("the dataset is empty; give it at least one row with a prompt")
        self._optimizer.use(optimizer, scheduler)
        if self._run_folder is None:
            about, place = {"agent": "step trainer", "tools": []}, self.folder
            self._run_folder = RunFolder.create(place.parent, place.name, self.config, about, at=place)
        rows = outside_event_loop(partial(self._run, problems, self._run_folder))
        self.save_checkpoint("final")
        rewards = [row.get("reward_mean", math.nan) for row in rows]
        return {"loss": [row["loss"] for row in rows], "reward": rewards, "steps": len(rows), "rows": rows}

    def _run(self, problems: Sequence[Problem], folder: RunFolder) -> list[dict[str, float]]:
        """Train on all problems as a run of its own; returns the metrics of its steps."""
        rows: list[dict[str, float]] = []
        first, training = self.step, self._training

        def on_step(step: int, metrics: dict[str, float]) -> dict[str, float]:
            training.state = run.training.state
            self.epoch = (step - first) * self.config.train.problems_per_step / len(problems)
            rows.append(self._report(metrics))
            if (every := self.config.checkpoint.every) and step % every == 0:
                self.save_checkpoint(f"checkpoint-{step}")
            return rows[-1]

        next_pass = -(-self._drawn // len(problems)) * len(problems)  # a pass has every problem once
        with asyncio.Runner() as runner, console_progress(on_step=on_step) as progress:
            run = Run.build(
                self.config,
                PromptTask(problems, self._reward, self.tokenizer, self._stops),
                folder,
                runner=runner,
                watcher=progress,
                loaded=LoadedModel(self.model, self.tokenizer, type(self.model).__name__, ""),
                policy=training.policy,
                learner=self._learner,
                state=replace(training.state, source={"cursor": next_pass}),
                steps=first + total_steps(self.config, len(problems)),
                keeps_checkpoints=False,
                objective=self.objective,
            )
            try:
                run.train()
            finally:
                training.state = run.training.state
        return rows

    def save_checkpoint(self, name: str) -> Path:
        """Save the model (its adapter, if it has one), the tokenizer and training_config.json."""
        folder = save_hf(self.model, self.tokenizer, self.folder / name)
        names = ("learning_rate", "batch_size", "num_epochs", "max_steps", "num_generations", "step")
        about = {name: getattr(self, name) for name in names} | {"timestamp": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        write_json(folder / "training_config.json", about)
        return folder

    @property
    def _drawn(self) -> int:
        """Number of problems sampled so far; with the seed it decides the next samples."""
        return int(self._training.state.source.get("cursor", 0))

    def _sample(self, problems: Sequence[Problem], *, scored: bool = True) -> list[Group]:
        task = PromptTask(problems, self._reward if scored else None, self.tokenizer, self._stops)
        keys = [f"{self.config.seed}/{self._drawn + i}" for i in range(len(problems))]
        collector, size = task.collector(self._training.policy, self.config), self.config.rollout.group_size
        return outside_event_loop(lambda: asyncio.run(collector.collect(problems, size, keys)))

    def _report(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics of a step with the learning rate of the user's scheduler."""
        if metrics.get("truncation_rate") == 1.0 and self.config.train.mask_truncated:
            log.warning(
                "step %d: every answer was cut off at max_new_tokens=%d, so nothing was learned; "
                "raise rollout.max_new_tokens or set train.mask_truncated to false",
                self.step,
                self.config.rollout.max_new_tokens,
            )
        return {"loss": 0.0, **metrics, **self._optimizer.after_step(), "step": float(self.step), "epoch": self.epoch}


def _resolve(config: RunConfig | GRPOTrainingConfig | Path | str | None) -> RunConfig:
    """The settings as a config; rejects those that have no effect here."""
    if config is None and DEFAULT_CONFIG.is_file():
        log.warning("the settings are those of %s; pass config=RunConfig() for the defaults", DEFAULT_CONFIG)
        config = DEFAULT_CONFIG
    match config:
        case GRPOTrainingConfig():
            config = config.to_run_config()
        case Path() | str():
            config = RunConfig.build(read_yaml_config(Path(config)))
        case None:
            config = RunConfig()
    if config.train.epochs is None:
        config = config.with_settings({"train.epochs": 1})
    for reason, keys in _WITHOUT_EFFECT.items():
        config.refuse(keys, f"StepTrainer {reason}")
    if "wandb" in config.track.report_to and find_spec("wandb") is None:
        log.warning("wandb is not installed, so nothing is reported to it; pip install 'palestra[wandb]'")
        others = [name for name in config.track.report_to if name != "wandb"]
        config = config.with_settings({"track.report_to": others})
    return config
