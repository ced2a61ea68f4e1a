"""A run's settings as the work of its steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from palestra.core.config import RunConfig
from palestra.core.config_sections import LORA_RANK, NEW_TOKENS
from palestra.plan.device import Device, cpu
from palestra.plan.estimate import estimate
from palestra.plan.memory import suited_micro_batch
from palestra.plan.shape import ModelShape
from palestra.plan.work import MICRO_BATCH, Method, StepWork

STEP_SIZES = ((4, 4), (8, 8), (16, 8), (32, 8), (32, 16), (64, 16))  # problems × rollouts of each
CPU_SIZES = STEP_SIZES[:3]
GPU_STEP_S, CPU_STEP_S = 6.0, 2.0  # target time of a step whose size the run chooses
UNKNOWN_GPU_STEP = (8, 8)
USUAL_PROMPT, USUAL_NEW_SHARE = 512, 0.25  # tokens of a prompt, and the share of max_new_tokens that a rollout samples
SMALL_CONTEXT, CONTEXT_SHARE = 4096, 8
# every CPU counts as this one, so that a run has the same steps on all of them
_ANY_CPU = cpu(4, 16.0)
_WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def with_suited_step(
    config: RunConfig,
    shape: ModelShape | None,
    device: Device | None,
    *,
    gpus: int = 1,
    max_problems: int | None = None,
    max_group: int | None = None,
) -> RunConfig:
    """Choose problems per step, rollouts per problem and new tokens where they are not given.

    The largest of `STEP_SIZES` whose step, by the cost model and usual lengths, takes a few seconds and fits in
    memory. By data sheets, not by measurements: the same machine always gives the same sizes. None for a shape or a
    GPU that the cost model does not know.
    """
    context = None if shape is None else shape.context
    tokens = NEW_TOKENS if not context or context >= SMALL_CONTEXT else max(1, context // CONTEXT_SHARE)
    sampled = max(1, round(USUAL_NEW_SHARE * (config.rollout.max_new_tokens or tokens)))

    def limited(problems: int, group: int) -> tuple[int, int]:
        return min(problems, max_problems or problems), min(group, max(2, max_group or group))

    def is_quick(size: tuple[int, int]) -> bool:
        where = device if device is not None and device.is_gpu else _ANY_CPU
        prompt = min(USUAL_PROMPT, context // CONTEXT_SHARE) if context else USUAL_PROMPT
        assert shape is not None
        work = work_of(config.with_step_size(*size), shape, where, prompt_tokens=prompt, gpus=gpus)
        planned = estimate(shape, where, replace(work, new_tokens=sampled))
        return planned.fits and planned.time.total_s <= (GPU_STEP_S if where.is_gpu else CPU_STEP_S)

    sizes = [limited(*size) for size in (CPU_SIZES if device and not device.is_gpu else STEP_SIZES)]
    if device is None:
        size = limited(*UNKNOWN_GPU_STEP)
    else:
        size = next((size for size in reversed(sizes) if shape is not None and is_quick(size)), sizes[0])
    return config.with_step_size(*size, tokens)


def work_of(config: RunConfig, shape: ModelShape, device: Device, **rollouts: Any) -> StepWork:
    """One step where every rollout samples all of its `rollout.max_new_tokens`.

    `rollouts` are fields of StepWork that are no settings: prompt_tokens, tool_tokens, turns, gpus, signal, tool_s.
    """
    config = config.with_step_size()
    train, model, lora = config.train, config.model, config.lora
    method: Method = "qlora" if lora.load_in_4bit else "lora" if lora.r else "full"
    work = StepWork(
        problems=train.problems_per_step,
        group_size=config.rollout.group_size,
        new_tokens=config.rollout.max_new_tokens,
        method=method,
        lora_rank=lora.r or LORA_RANK,
        tokens_per_micro_batch=train.tokens_per_micro_batch or MICRO_BATCH,
        gradient_checkpointing=model.gradient_checkpointing,
        master_weights=model.master_weights,
        sleep_mode=model.sleep_mode,
        kv_memory_gib=model.kv_memory_gib,
        share_prefix=train.share_prefix,
        max_staleness=config.rollout.max_staleness,
        reference=train.beta > 0,
        iterations=train.iterations,
        minibatches=train.minibatches,
        weight_bytes=_WEIGHT_BYTES.get(model.dtype, device.weight_bytes),
        **rollouts,
    )
    if train.tokens_per_micro_batch is None:
        work = replace(work, tokens_per_micro_batch=suited_micro_batch(shape, device, work))
    return work
