"""What a run will need, printed before it starts: the model, its cases, memory, disk and time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from palestra.core.config import RunConfig
from palestra.core.errors import ResourceError
from palestra.core.files import free_bytes
from palestra.core.types import Rollout
from palestra.evals.report import EvalReport
from palestra.plan.estimate import RunEstimate, duration_text
from palestra.train.forecast import forecast
from palestra.train.setup import parameter_count

_MOMENTS_BYTES = 8  # Adam keeps two float32 a weight
_MASTER_BYTES = 4
STEP_KEYS = ("train.problems_per_step", "rollout.group_size", "rollout.max_new_tokens")
_ROLLOUT_BYTES = 4000  # of one rollout in rollouts.jsonl, roughly


@dataclass(frozen=True, slots=True)
class Overview:
    """The numbers of a run, before it starts."""

    weights: int  # 0 where the model is on another machine
    trainable: int
    bytes_per_weight: int
    device: str
    dtype: str
    train_cases: int | None
    eval_cases: int | None
    steps: int
    config: RunConfig
    planned: RunEstimate | None = None  # by the cost model, where it knows the model and the device
    chosen: Sequence[str] = ()  # those of STEP_KEYS that the run chose

    @classmethod
    def of(cls, model: Any, config: RunConfig, steps: int, train_cases: int | None, eval_cases: int | None) -> Overview:
        if model is None:
            return cls(0, 0, 0, "", "", train_cases, eval_cases, steps, config)
        parameters = list(model.parameters())
        trainable = sum(p.numel() for p in parameters if p.requires_grad)
        first = parameters[0]
        return cls(
            parameter_count(model),
            trainable,
            first.element_size(),
            str(first.device),
            str(first.dtype).removeprefix("torch."),
            train_cases,
            eval_cases,
            steps,
            config,
            forecast(config, model.config, first.device) if hasattr(model, "config") else None,
        )

    @property
    def state_bytes(self) -> int:
        """What the optimizer keeps."""
        has_master = self.bytes_per_weight < 4 and self.config.model.master_weights and not self.config.lora.r
        return self.trainable * (_MOMENTS_BYTES + (_MASTER_BYTES if has_master else 0))

    @property
    def memory_bytes(self) -> int:
        """Weights, gradients and optimizer; the sampler's cache and the activations come on top."""
        return (self.weights + self.trainable) * self.bytes_per_weight + self.state_bytes

    @property
    def model_bytes(self) -> int:
        """The saved model, or its adapter."""
        return (self.trainable if self.config.lora.r else self.weights) * self.bytes_per_weight

    @property
    def checkpoint_bytes(self) -> int:
        """One checkpoint: the model, the optimizer's state and the best weights so far."""
        best = self.trainable * self.bytes_per_weight if self.config.train.max_rollbacks else 0
        return self.model_bytes + self.state_bytes + best

    def require_disk(self, folder: Path) -> None:
        """Raise PalestraError unless one checkpoint and the final model fit on the disk."""
        least = self.model_bytes + (self.checkpoint_bytes if self.config.checkpoint.every else 0)
        free = free_bytes(folder)
        if free < least:
            raise ResourceError(
                f"the disk of {folder} has {_size(free)} free; a checkpoint and the final model need {_size(least)}. "
                "Free some space, choose another output_dir, or set checkpoint.every=0"
            )

    @property
    def disk_bytes(self) -> int:
        keep = self.config.checkpoint
        checkpoints = keep.keep_last + (1 if keep.keep_best else 0) if keep.every else 1
        every = self.config.track.rollouts_every
        rollouts = self.rollouts * self.steps // every if every else 0
        return checkpoints * self.checkpoint_bytes + self.model_bytes + rollouts * _ROLLOUT_BYTES

    @property
    def rollouts(self) -> int:
        """Of one step."""
        return self.config.train.problems_per_step * self.config.rollout.group_size

    def time_text(self, before: EvalReport) -> str:
        """How long the training may take: sampling by what the evaluation took, learning by the cost model."""
        sampling_s = self.rollouts * before.seconds / max(1, len(before.rollouts))
        learning_s = sampling_s if self.planned is None else self._seen(self.planned, before.rollouts).time.learning_s
        seconds = self.steps * (sampling_s + learning_s)
        about = f"about {duration_text(seconds)}" if seconds >= 60 else "less than a minute"
        return f"the training may take {about}, by what the evaluation took and the plan of a step"

    @staticmethod
    def _seen(planned: RunEstimate, rollouts: Sequence[Rollout]) -> RunEstimate:
        """The plan for rollouts as long as these."""
        whole = [rollout for rollout in rollouts if rollout.turns]
        if not whole:
            return planned
        prompt = fmean(len(rollout.turns[0].token_ids) for rollout in whole)
        new = fmean(rollout.sampled_tokens for rollout in whole)
        tools = fmean(sum(len(turn.token_ids) for turn in rollout.turns) for rollout in whole) - prompt - new
        lengths = [max(least, round(mean)) for least, mean in ((1, prompt), (1, new), (0, tools))]
        work = replace(planned.work, prompt_tokens=lengths[0], new_tokens=lengths[1], tool_tokens=lengths[2])
        return planned.with_work(work)

    def text(self, folder: Path) -> str:
        """A few lines for people."""
        config, train = self.config, self.config.train
        cases = "" if self.train_cases is None else f"{self.train_cases:,} cases to train on, "
        cases += "" if self.eval_cases is None else f"{self.eval_cases:,} to score before and after; "
        tokens = self.rollouts * config.rollout.max_new_tokens
        stages = "" if config.stages.plan == "grpo" else f"stages: {config.stages.plan}; "
        size = f"{train.problems_per_step} × {config.rollout.group_size} rollouts, up to {tokens:,} new tokens a step"
        steps = f"{cases}{stages}{self.steps:,} steps of {size}" if self.steps else f"{cases}{stages}".rstrip("; ")
        if not self.weights:
            trained = f"LoRA of rank {config.lora.r}" if config.lora.r else "all weights trained"
            return "\n".join([f"{config.model.name}: {trained}, on a Tinker server", steps, *self._choice_text()])
        trained = "all trained" if self.trainable == self.weights else f"{_millions(self.trainable)} trained"
        free = free_bytes(folder)
        disk = f"{_size(self.disk_bytes)} of disk" + (
            "" if free > self.disk_bytes else f"; only {_size(free)} are free"
        )
        lines = [
            f"{config.model.name}: {_millions(self.weights)} weights, {trained}, {self.dtype} on {self.device}",
            steps,
            f"needs about {self._memory_text()}, and {disk}",
            *self._choice_text(),
        ]
        return "\n".join(lines if self.planned is None else [*lines, self._step_text(self.planned)])

    def _choice_text(self) -> list[str]:
        """One line about the sizes that were not given, or none."""
        if not self.chosen:
            return []
        values = ", ".join(f"{key} = {self.config.value(key)}" for key in self.chosen)
        where = "defaults" if not self.weights else f"chosen for {_millions(self.weights)} weights on {self.device}"
        return [f"{where}: {values}; set to override"]

    def _memory_text(self) -> str:
        if self.planned is None:
            return f"{_size(self.memory_bytes)} of memory besides cache and activations"
        need = self.planned.memory
        whole = f" of {self.planned.device.memory_gib:.0f} GiB" if self.planned.device.is_gpu else " of memory"
        return (
            f"{_size(need.total)}{whole} (weights, gradients and optimizer {_size(need.states)}, activations "
            f"{_size(need.working)}, KV cache {_size(need.kv)})"
        )

    @staticmethod
    def _step_text(planned: RunEstimate) -> str:
        time, (part, share) = planned.time, planned.bottleneck
        largest = f"mostly {part}" if share > 0.5 else f"the largest part is {part}"
        return (
            f"a step may take {duration_text(time.total_s)} where every rollout uses all of its tokens: sampling "
            f"{duration_text(time.sampling_s)}, learning {duration_text(time.learning_s)}; {largest} ({share:.0%})"
        )


def _millions(count: int) -> str:
    """
    >>> _millions(1_234_567), _millions(600_000_000), _millions(8_000_000_000)
    ('1.2 M', '600 M', '8 B')
    """
    return f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.3g} M" if count < 1e7 else f"{count / 1e6:.0f} M"


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{max(1, count / 2**20):.0f} MiB"
