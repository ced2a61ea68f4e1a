"""Forecast of a run: the estimate of a step by the cost model, whether it fits, and the overview before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from palestra.core.config import RunConfig
from palestra.core.errors import ResourceError
from palestra.core.files import free_bytes
from palestra.core.ranks import RankVariables
from palestra.core.types import Rollout
from palestra.evals.report import EvalReport
from palestra.learner.micro_batches import data_sheet, device_of
from palestra.plan.device import GIB
from palestra.plan.estimate import RunEstimate, duration_text, estimate, least
from palestra.plan.memory import USABLE
from palestra.plan.of_config import with_suited_step, work_of
from palestra.plan.shape import shape_of

PROMPT_TOKENS = 512  # of a problem, before one has been seen


def parameter_count(model: Any) -> int:
    """All weights; of those in 4 bits there are two in a byte."""
    return sum(p.numel() * (2 if p.dtype == torch.uint8 else 1) for p in model.parameters())


def forecast(
    config: RunConfig, model_config: Any, where: torch.device, *, prompt_tokens: int = PROMPT_TOKENS
) -> RunEstimate | None:
    """The estimate of a run's steps; None where the model or the GPU is not known to the cost model."""
    shape, device = shape_of(model_config), device_of(where)
    if shape is None or device is None:
        return None
    place = RankVariables.of_environment()
    work = work_of(config, shape, device, prompt_tokens=prompt_tokens, gpus=place.size if place else 1)
    context = getattr(model_config.get_text_config(), "max_position_embeddings", None)
    if context and work.new_tokens > context:  # rollouts end where the context is full
        work = replace(work, new_tokens=context)
    return estimate(shape, device, work)


def with_step_size(
    config: RunConfig,
    model_config: Any,
    where: torch.device,
    *,
    max_problems: int | None = None,
    max_group: int | None = None,
) -> RunConfig:
    """Choose the sizes of a step that are not given, for this model on this device (docs/guide.md)."""
    shape = shape_of(model_config) if model_config is not None else None
    place = RankVariables.of_environment()
    device = data_sheet(where)
    gpus = place.size if place and where.type == "cuda" else 1
    limits = {"max_problems": max_problems, "max_group": max_group}
    return with_suited_step(config, shape, device, gpus=gpus, **limits)


def refuse_what_cannot_fit(config: RunConfig, model_config: Any, where: torch.device, *, training: bool = True) -> None:
    """Before the weights are loaded: an error where not even the smallest micro-batch would fit on the GPU, or one
    rollout's cache if the model is only sampled from."""
    config = with_step_size(config, model_config, where)
    found = forecast(config, model_config, where) if where.type == "cuda" else None
    if found is None or config.vllm_mode == "colocate":
        return
    need, usable = least(found).memory, found.device.memory_gib * USABLE
    if not training:
        if need.weights + need.kv > usable * GIB:
            raise ResourceError(
                f"{config.model.name} does not fit: its weights need {need.weights / GIB:.1f} GiB and the cache of one "
                f"rollout {need.kv / GIB:.1f}, and {usable:.1f} GiB of the GPU can be used; end other programs on the "
                "GPU, lower rollout.max_new_tokens, or choose a smaller model"
            )
    elif need.total > usable * GIB:
        states = need.states - need.weights
        raise ResourceError(
            f"{config.model.name} does not fit: training it needs at least {need.total / GIB:.1f} GiB (weights "
            f"{need.weights / GIB:.1f}, gradients and optimizer {states / GIB:.1f}, activations of "
            f"one rollout {need.working / GIB:.1f}), and {usable:.1f} GiB of the GPU can be used; "
            f"{found.remedy()}"
        )


def kv_memory_for(config: RunConfig, model: Any) -> float | None:
    """GiB of the sampler's cache; None leaves it to the engine, which takes half of what is free.

    Gradients, optimizer states, master weights and activations come later than the cache: where they would not find
    room beside half of the memory, the cache gets what they leave. Where whole micro-batches leave too little for the
    rollouts, they will be smaller ones.
    """
    if config.model.kv_memory_gib is not None or model.device.type != "cuda" or config.model.sleep_mode:
        return config.model.kv_memory_gib
    found = forecast(config, model.config, model.device)
    if found is None:
        return None
    free, total = (size / GIB for size in torch.cuda.mem_get_info(model.device))

    def left_by(plan: RunEstimate, fill: float = 1.0) -> float:
        later = plan.memory.states - plan.memory.weights + plan.memory.working * fill
        return free - later / GIB - (1 - USABLE) * total

    smallest, packed = least(found), found.work.packed
    fill = min(found.work.tokens_per_micro_batch, packed.tokens) / packed.largest  # where other lengths pack better
    enough = left_by(found, max(1.0, fill))
    if enough < found.memory.kv / GIB:
        enough = left_by(smallest)
    return None if enough > free / 2 else max(enough, smallest.memory.kv / GIB)


def memory_remedy(error: Exception, config: RunConfig) -> str:
    """The settings to change when memory ran out; nothing for other errors."""
    if not isinstance(error, MemoryError) and "out of memory" not in str(error).lower():
        return ""
    model, tokens = config.model, config.train.tokens_per_micro_batch or "16384 or more, by the model"
    remedies = {
        f"a lower train.tokens_per_micro_batch (now {tokens})": True,
        "model.gradient_checkpointing=true": not model.gradient_checkpointing,
        "model.sleep_mode=true": not model.sleep_mode,
        "a lower model.kv_memory_gib": True,
        "lora.r=16": not config.lora.r,
        f"a lower rollout.max_new_tokens (now {config.rollout.max_new_tokens})": True,
    }
    return f"To need less memory, in this order: {', '.join(text for text, helps in remedies.items() if helps)}. "


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
        trainable, first = sum(p.numel() for p in parameters if p.requires_grad), parameters[0]
        place = first.element_size(), str(first.device), str(first.dtype).removeprefix("torch.")
        planned = forecast(config, model.config, first.device) if hasattr(model, "config") else None
        return cls(parameter_count(model), trainable, *place, train_cases, eval_cases, steps, config, planned)

    @property
    def state_bytes(self) -> int:
        """Size of the optimizer's state."""
        has_master = self.bytes_per_weight < 4 and self.config.model.master_weights and not self.config.lora.r
        return self.trainable * (_MOMENTS_BYTES + (_MASTER_BYTES if has_master else 0))

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
        free, disk = free_bytes(folder), f"{_size(self.disk_bytes)} of disk"
        disk += "" if free > self.disk_bytes else f"; only {_size(free)} are free"
        lines = [
            f"{config.model.name}: {_millions(self.weights)} weights, {trained}, {self.dtype} on {self.device}",
            steps,
            f"needs about {self._memory_text()}, and {disk}",
            *self._choice_text(),
        ]
        if self.planned is not None:
            time, (part, share) = self.planned.time, self.planned.bottleneck
            largest = f"mostly {part}" if share > 0.5 else f"the largest part is {part}"
            lines.append(
                f"a step may take {duration_text(time.total_s)} where every rollout uses all of its tokens: sampling "
                f"{duration_text(time.sampling_s)}, learning {duration_text(time.learning_s)}; {largest} ({share:.0%})"
            )
        return "\n".join(lines)

    def _choice_text(self) -> list[str]:
        """One line about the sizes that were not given, or none."""
        if not self.chosen:
            return []
        values = ", ".join(f"{key} = {self.config.value(key)}" for key in self.chosen)
        where = "defaults" if not self.weights else f"chosen for {_millions(self.weights)} weights on {self.device}"
        return [f"{where}: {values}; set to override"]

    def _memory_text(self) -> str:
        if self.planned is None:
            known = (self.weights + self.trainable) * self.bytes_per_weight + self.state_bytes
            return f"{_size(known)} of memory besides cache and activations"
        need = self.planned.memory
        whole = f" of {self.planned.device.memory_gib:.0f} GiB" if self.planned.device.is_gpu else " of memory"
        return (
            f"{_size(need.total)}{whole} (weights, gradients and optimizer {_size(need.states)}, activations "
            f"{_size(need.working)}, KV cache {_size(need.kv)})"
        )


def _millions(count: int) -> str:
    """
    >>> _millions(1_234_567), _millions(600_000_000), _millions(8_000_000_000)
    ('1.2 M', '600 M', '8 B')
    """
    return f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.3g} M" if count < 1e7 else f"{count / 1e6:.0f} M"


def _size(count: float) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{max(1, count / 2**20):.0f} MiB"
