"""GRPO by hand: any Hugging Face model and tokenizer, a reward, and one method for each part of a step."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from palestra.algo.advantage import advantages as normalise
from palestra.chat.messages import as_messages
from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.event_loop import outside_event_loop
from palestra.core.files import write_json
from palestra.core.grpo_config import GRPOTrainingConfig
from palestra.core.run_folder import RunFolder
from palestra.core.types import Group, Message, Problem, Rollout, Sampled, Turn
from palestra.core.yaml_config import read_yaml_config
from palestra.export.hf import save_hf
from palestra.learner.given_optimizer import GivenOptimizer
from palestra.learner.local import LocalLearner
from palestra.rollout.collect import seed_of
from palestra.tracking.open import open_trackers
from palestra.train.loop import draw, total_steps
from palestra.train.metrics import rollout_metrics
from palestra.train.samples import trainable_samples
from palestra.train.setup import build_policy, sampling_params
from palestra.train.step_inputs import (
    Input,
    Prompt,
    Reward,
    as_input,
    as_problem,
    encode_prompt,
    reward_function,
    stop_token_ids,
)
from palestra.train.step_progress import progress_bar

log = logging.getLogger("palestra")


@dataclass(frozen=True, slots=True)
class Output:
    """One sampled answer: its text, and the tokens that it is trained as."""

    text: str
    prompt_ids: tuple[int, ...]
    sampled: Sampled


class StepTrainer:
    """Trains `model` in place, whole or by its PEFT adapter, one optimizer step at a time.

    >>> trainer = StepTrainer(model, tokenizer, lambda output, expected: float(expected in output))  # doctest: +SKIP
    >>> trainer.train_step("2 + 2 = ", "4")["reward_mean"]
    0.25
    >>> history = trainer.train([{"prompt": "2 + 2 = ", "expected_answer": "4"}, ...])

    A prompt is text, taken as it is, or chat messages, put through the tokenizer's chat template.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        reward_model_or_fn: Reward,
        config: RunConfig | GRPOTrainingConfig | None = None,
    ) -> None:
        self.model = model.eval()  # dropout is for the learner alone, which switches it on
        self.tokenizer = tokenizer
        self.config = config.to_run_config() if isinstance(config, GRPOTrainingConfig) else config or RunConfig()
        self.step = 0
        self.epoch = 0.0  # passes over the dataset of `train`
        self.folder = Path(self.config.output_dir) / (
            self.config.track.run_name or f"step-trainer-{time.strftime('%Y%m%d-%H%M%S')}"
        )
        self.config.rollout.require_free_calls("StepTrainer samples without tools")
        self._reward = reward_function(reward_model_or_fn)
        self._optimizer = GivenOptimizer(model, self.config.train, master_weights=self.config.model.master_weights)
        self._learner = LocalLearner(model, config=self.config, optimizer=self._optimizer)
        self._policy = build_policy(model, tokenizer, self.config.model.engine, self.config.model.kv_memory_gib)
        self._sampling = sampling_params(self.config.rollout, stop_token_ids(model, tokenizer))

    @classmethod
    def from_yaml(cls, path: Path | str, reward_model_or_fn: Reward) -> StepTrainer:
        """The model and the settings of one YAML file."""
        from palestra.learner.lora import add_lora
        from palestra.models.loading import load_model
        from palestra.train.setup import seed_everything

        config = RunConfig.build(read_yaml_config(Path(path)))
        seed_everything(config.seed)
        loaded = load_model(config.model.name, dtype=config.model.dtype, device=config.model.device)
        model = add_lora(loaded.model, config.lora) if config.lora.r else loaded.model
        return cls(model, loaded.tokenizer, reward_model_or_fn, config)

    def generate_group_outputs(self, prompt: Prompt) -> list[Output]:
        """`rollout.group_size` answers to one prompt; the prompt is computed once for all."""
        [outputs] = self._generate([as_input(prompt)])
        return outputs

    def calculate_advantages(self, rewards: Sequence[float], group: Sequence[int] | None = None) -> list[float]:
        """How much better than its siblings each answer was: (r − mean) / std unless the config says otherwise.

        All rewards are of one group, unless `group` says which group each belongs to.
        """
        train = self.config.train
        members = list(group) if group is not None else [0] * len(rewards)
        return normalise(
            list(rewards), members, scale=train.advantage_scale, leave_one_out=train.leave_one_out
        ).tolist()

    def train_step(self, prompt: Prompt, expected_answer: Any = None) -> dict[str, float]:
        """One optimizer step on one prompt: sample a group, reward it, learn. Gives the step's metrics."""
        return self.train_batch([Problem(str(self.step), as_input(prompt), expected_answer)])

    def train_batch(self, problems: Sequence[Problem]) -> dict[str, float]:
        """One optimizer step on several prompts."""
        groups = [
            Group(problem.id, tuple(self._score(problem, output) for output in outputs))
            for problem, outputs in zip(problems, self._generate([p.input for p in problems]), strict=True)
        ]
        metrics = self._learn(groups)
        self.step += 1
        return {**metrics, "step": float(self.step), "epoch": self.epoch}

    def train(
        self, dataset: Iterable[Any], optimizer: Any | None = None, scheduler: Any | None = None
    ) -> list[dict[str, float]]:
        """Train to `train.max_steps`, or for `train.epochs` passes; gives every step's metrics.

        A row has `prompt` and `expected_answer` (or `answer`), or is a pair of the two. Checkpoints, the
        `final` model and metrics.jsonl are written to `folder`. Without an optimizer, AdamW by the config.
        """
        problems = [as_problem(i, row) for i, row in enumerate(dataset)]
        if not problems:
            raise PalestraError("the dataset is empty; give it at least one row with a prompt")
        if optimizer is not None or scheduler is not None:
            self._optimizer.use(optimizer, scheduler)
        batch, every = self.config.train.problems_per_step, self.config.checkpoint.every
        first, last = self.step, self.step + total_steps(self.config, len(problems))
        self._learner.total_steps = last
        self.folder.mkdir(parents=True, exist_ok=True)
        history: list[dict[str, float]] = []
        trackers = open_trackers(self.config, RunFolder(self.folder), {"agent": "step trainer"}, first or None)
        try:
            with progress_bar(last - first) as advance:
                while self.step < last:
                    start = (self.step - first) * batch
                    self.epoch = (start + batch) / len(problems)
                    metrics = self.train_batch(draw(problems, start, batch, self.config.seed))
                    trackers.metrics(self.step, {k: v for k, v in metrics.items() if k != "step"})
                    history.append(metrics)
                    advance(metrics)
                    if every and self.step % every == 0:
                        self.save_checkpoint(f"checkpoint-{self.step}")
        finally:
            trackers.close()
        self.save_checkpoint("final")
        return history

    def save_checkpoint(self, name: str) -> Path:
        """The model (its adapter, where it has one), the tokenizer and training_config.json."""
        train = self.config.train
        folder = save_hf(self.model, self.tokenizer, self.folder / name)
        settings = {
            "learning_rate": train.learning_rate,
            "batch_size": train.problems_per_step,
            "num_epochs": train.epochs,
            "max_steps": train.max_steps,
            "num_generations": self.config.rollout.group_size,
            "step": self.step,
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        write_json(folder / "training_config.json", settings)
        return folder

    def _generate(self, prompts: Sequence[Input]) -> list[list[Output]]:
        prompt_ids = [encode_prompt(self.tokenizer, prompt) for prompt in prompts]

        async def sample_all() -> list[list[Sampled]]:
            return await asyncio.gather(*(self._sample_group(i, ids) for i, ids in enumerate(prompt_ids)))

        sampled = outside_event_loop(lambda: asyncio.run(sample_all()))
        return [
            [Output(self._text(one.token_ids), ids, one) for one in group]
            for ids, group in zip(prompt_ids, sampled, strict=True)
        ]

    async def _sample_group(self, index: int, prompt_ids: tuple[int, ...]) -> list[Sampled]:
        sessions = self._policy.fork(self._policy.open(prompt_ids), self.config.rollout.group_size)
        try:
            turns = [
                self._policy.sample(
                    session,
                    replace(self._sampling, seed=seed_of(f"{self.config.seed}/{self.step}/{index}/{sibling}")),
                )
                for sibling, session in enumerate(sessions)
            ]
            return await asyncio.gather(*turns)
        finally:
            for session in sessions:
                self._policy.close(session)

    def _text(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _score(self, problem: Problem, output: Output) -> Rollout:
        reward = self._reward(output.text, problem.expect)
        sampled = output.sampled
        return Rollout(
            problem_id=problem.id,
            turns=(
                Turn("template", output.prompt_ids),
                Turn("model", sampled.token_ids, sampled.logprobs, sampled.policy_version),
            ),
            messages=(*as_messages(problem.input), Message("assistant", output.text)),
            stop="truncated" if sampled.finish == "length" else "answered",
            reward=reward,
        )

    def _learn(self, groups: Sequence[Group]) -> dict[str, float]:
        train, size = self.config.train, self.config.rollout.group_size
        flat = self.calculate_advantages(
            [r for group in groups for r in group.rewards], [g for g in range(len(groups)) for _ in range(size)]
        )
        advantages = [flat[i : i + size] for i in range(0, len(flat), size)]
        metrics = {"loss": 0.0, **rollout_metrics(groups, advantages, self._learner.version)}
        samples = trainable_samples(groups, advantages, train)
        if any(any(sample.trained) for sample in samples):
            metrics |= self._learner.step(samples, train)
            metrics |= self._optimizer.after_step()
            self._policy.refresh(self._learner.publish())
            return metrics
        self._learner.skip()
        if samples:
            log.warning(
                "step %d: every answer was cut off at max_new_tokens=%d, so nothing was learned; "
                "raise rollout.max_new_tokens or set train.mask_truncated to false",
                self.step + 1,
                self.config.rollout.max_new_tokens,
            )
        return metrics
