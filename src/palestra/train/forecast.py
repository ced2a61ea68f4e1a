"""The cost model for a run: on which device it is, what a step will take, and whether it can fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from palestra.core.config import RunConfig
from palestra.core.errors import ResourceError
from palestra.core.ranks import RankVariables
from palestra.learner.micro_batches import data_sheet, device_of
from palestra.plan.device import GIB
from palestra.plan.estimate import RunEstimate, estimate, least
from palestra.plan.memory import USABLE
from palestra.plan.of_config import with_suited_step, work_of
from palestra.plan.shape import shape_of

PROMPT_TOKENS = 512  # of a problem, before one has been seen


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
