"""The interface of runners: they own the KV of one model on one kind of device, and run the engine's steps there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from palestra.core.machine import memory_gib
from palestra.engine.recurrent import StateStore
from palestra.engine.session import Chunk, Collect, Session

GIB = 1 << 30


class KVMemory:
    """The KV of sessions. The hooks do nothing where steps read and write pages in place."""

    def enter(self, session: Session) -> None:
        """Called before the first step of a turn."""

    def leave(self, session: Session) -> None:
        """Called after the last step of a turn."""

    def drop(self, session: Session) -> None:
        """Discard the session's KV, whether it runs or not."""

    def store(self, session: Session) -> None:
        """Write the session's KV to its pages, because another session will share them."""

    def copy_page(self, source: int, target: int) -> None:
        raise NotImplementedError


class Runner:
    """Runs steps on one kind of device."""

    decode_steps: int = 1  # tokens that a session may sample before the scheduler plans again
    overlaps: bool = False  # whether a launched step runs while the host does something else
    path: str | None = None  # of `paths` the one to use wherever possible; None: the fastest
    paths: Sequence[str]  # ways to compute a decode step; the self-check runs all of them
    memory: KVMemory
    states: StateStore  # of recurrent layers

    def weights_changed(self) -> None:
        """Update what was derived from the weights."""

    def release_memory(self) -> None:
        """Free the KV memory; no session has KV at this moment."""
        raise NotImplementedError

    def reserve_memory(self, pages: int) -> None:
        """Allocate KV memory of `pages` pages; CacheTooLarge if it does not fit."""
        raise NotImplementedError

    def disable_fast_path(self) -> bool:
        """Run the module's own layers from now on; False if that is the case already."""
        raise NotImplementedError

    def launch(self, chunks: Sequence[Chunk]) -> Collect:
        """Start a step; the returned function waits for it and returns what each sampling chunk emitted."""
        raise NotImplementedError


def default_kv_bytes(device: torch.device) -> float:
    """Half of the GPU's free memory; on a CPU a quarter of the machine's memory, at most 4 GiB (allocated on use)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] * 0.5
    return min(4 * GIB, memory_gib() * GIB / 4)
