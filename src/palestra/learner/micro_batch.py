"""How many tokens the learner computes at once, by the cost model: a plan, the KV cache and the learner agree on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.machine import memory_gib
from palestra.plan.device import GIB, Device, cpu, find_device
from palestra.plan.memory import captured_micro_batch
from palestra.plan.of_config import work_of
from palestra.plan.shape import shape_of
from palestra.plan.work import MICRO_BATCH


def data_sheet(where: torch.device) -> Device | None:
    """The device with its data sheet's figures, regardless of its current load; None for an unknown GPU."""
    if where.type != "cuda":
        return cpu(torch.get_num_threads(), memory_gib())
    try:
        return find_device(torch.cuda.get_device_name(where))
    except PalestraError:
        return None


def device_of(where: torch.device) -> Device | None:
    """The device with the memory that this process can have of it; None for a GPU without figures."""
    found = data_sheet(where)
    if found is None or not found.is_gpu:
        return found
    free, total = torch.cuda.mem_get_info(where)
    others = total - free - torch.cuda.memory_reserved(where)  # other processes, and the driver
    return replace(found, memory_gib=min(found.memory_gib, (total - others) / GIB))


def micro_batch_tokens(config: RunConfig, model_config: Any, where: torch.device, *, whole_logits: bool) -> int:
    """The tokens of a micro-batch; `whole_logits`: it holds the model's logits of every token."""
    shape, device = shape_of(model_config), device_of(where)
    if shape is None or device is None or whole_logits:
        return config.train.tokens_per_micro_batch or MICRO_BATCH
    return work_of(config, shape, device, prompt_tokens=1).tokens_per_micro_batch


def captured_tokens(config: RunConfig, model_config: Any, where: torch.device) -> int:
    """The tokens of the largest micro-batch whose pass is worth capturing, padding included."""
    shape, device = shape_of(model_config), device_of(where)
    if shape is None or device is None:
        return 0
    return captured_micro_batch(shape, device, work_of(config, shape, device, prompt_tokens=1))
