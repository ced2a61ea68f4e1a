"""A run's settings as the work of its steps."""

from __future__ import annotations

from dataclasses import replace

from palestra.core.config import RunConfig
from palestra.core.config_sections import LORA_RANK
from palestra.plan.device import Device
from palestra.plan.memory import suited_micro_batch
from palestra.plan.shape import ModelShape
from palestra.plan.work import MICRO_BATCH, Method, StepWork

_WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def work_of(
    config: RunConfig,
    shape: ModelShape,
    device: Device,
    *,
    prompt_tokens: int,
    tool_tokens: int = 0,
    turns: int = 1,
    gpus: int = 1,
    signal: float = 1.0,
    tool_s: float = 0.0,
) -> StepWork:
    """One step where every rollout samples all of its `rollout.max_new_tokens`."""
    train, model, lora = config.train, config.model, config.lora
    method: Method = "qlora" if lora.load_in_4bit else "lora" if lora.r else "full"
    work = StepWork(
        problems=train.problems_per_step,
        group_size=config.rollout.group_size,
        prompt_tokens=prompt_tokens,
        new_tokens=config.rollout.max_new_tokens,
        tool_tokens=tool_tokens,
        turns=turns,
        tool_s=tool_s,
        signal=signal,
        method=method,
        lora_rank=lora.r or LORA_RANK,
        gpus=gpus,
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
    )
    if train.tokens_per_micro_batch is None:
        work = replace(work, tokens_per_micro_batch=suited_micro_batch(shape, device, work))
    return work
