"""What runs the engine's steps: one runner for each kind of device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from palestra.core.machine import memory_gib
from palestra.engine.cpu.runner import CpuRunner
from palestra.engine.kv_shape import KVShape
from palestra.engine.scheduler import KVMemory
from palestra.engine.session import Chunk, Collect

GIB = 1 << 30


class Runner(KVMemory, Protocol):
    """Runs a step on one kind of device."""

    decode_steps: int
    overlaps: bool  # a step that has begun goes on while the host does something else
    path: str | None  # of `paths` the one to take wherever it can be; None: whichever is quicker

    @property
    def paths(self) -> Sequence[str]:
        """Ways to compute a decode step; the self-check goes through all."""
        ...

    def weights_changed(self) -> None: ...

    def release_memory(self) -> None:
        """Give the KV memory back; no session has KV at this moment."""
        ...

    def reserve_memory(self, pages: int) -> None:
        """Take it again, with so many pages; CacheTooLarge where there is not enough."""
        ...

    def disable_fast_path(self) -> bool:
        """Run the module's own layers from now on; False if that was so before."""
        ...

    def launch(self, chunks: Sequence[Chunk]) -> Collect:
        """Begin a step; call what comes back to wait for it and have what each sampling chunk emitted."""
        ...


def build_runner(
    model: nn.Module, shape: KVShape, pages: int, page_size: int, max_running: int, context: int
) -> Runner:
    """The runner for the device that the model is on."""
    if next(model.parameters()).device.type != "cuda":
        return CpuRunner(model, shape, pages, page_size)
    from palestra.engine.cuda.runner import CudaRunner

    return CudaRunner(model, shape, pages, page_size, max_running, context)


def default_kv_bytes(device: torch.device) -> float:
    """Half of what the GPU has free; on a CPU a quarter of the machine's memory, at most 4 GiB (taken as it fills)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] * 0.5
    return min(4 * GIB, memory_gib() * GIB / 4)
