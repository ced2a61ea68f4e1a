"""This machine: processors, memory, free ports, installed packages; CUDA graph capture and transfers to a GPU; where
the time of a step goes.

>>> phases = Phases()
>>> with phases("sample"):
...     with phases("decode"):
...         pass
>>> sorted(phases.take())
['decode', 'sample']
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import metadata
from itertools import accumulate
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SMALL_MODEL_PARAMETERS = 20_000_000  # below, a matrix product is too small to be split among threads


def processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def port_error(port: int) -> str | None:
    """Why this port of the loopback address cannot be opened; 0 is any."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return str(error.strerror)
    return None


def installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# Sampler and learner may have a thread each, and a capture begins by synchronising the GPU, which could break another
# capture in progress.
_one_at_a_time = threading.Lock()


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Capture what is launched inside into the graph; other threads may use the GPU at the same time."""
    import torch

    with _one_at_a_time, torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        yield


def lacks_memory(error: BaseException | None) -> bool:
    """Whether it is, or came while handling, a lack of memory on the GPU: to end a failed capture may fail, too."""
    import torch

    return error is not None and (isinstance(error, torch.OutOfMemoryError) or lacks_memory(error.__context__))


@contextmanager
def in_one_order(x: Tensor) -> Iterator[None]:
    """On a GPU, operations on x inside add up in the same order each time: the same numbers give the same bits.

    For the few operations that need it. Everywhere, it would refuse what has only one implementation.
    """
    import torch

    if not x.is_cuda or torch.are_deterministic_algorithms_enabled():
        yield
        return
    import torch.utils.deterministic as memory

    fills, memory.fill_uninitialized_memory = memory.fill_uninitialized_memory, False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        memory.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


ALIGNMENT = 16  # bytes: what kernels that read several numbers at once expect


def to_device(tensors: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    """The host's tensors on a device.

    In one transfer, since each costs a wait, and put together by numpy: torch would wake a thread on every core for
    each of them, which takes milliseconds on a large machine. From pinned memory: a GPU's stream is not waited for.
    """
    import torch

    tensors = list(tensors)
    if not tensors or tensors[0].device == device:
        return tensors
    ends = list(accumulate((-(-x.nbytes // ALIGNMENT) * ALIGNMENT for x in tensors), initial=0))
    together = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for x, start in zip(tensors, ends, strict=False):
        together.numpy()[start : start + x.nbytes] = x.numpy().reshape(-1).view(np.uint8)
    moved = together.to(device, non_blocking=True)
    pairs = zip(tensors, ends, strict=False)
    return [moved[start : start + x.nbytes].view(x.dtype).view(x.shape) for x, start in pairs]


def put(*pairs: tuple[Tensor, np.ndarray]) -> None:
    """Each array into the first rows and columns of its tensor, all in one transfer."""
    import torch

    arrays = to_device((torch.from_numpy(array) for _, array in pairs), pairs[0][0].device)
    for (target, _), source in zip(pairs, arrays, strict=True):
        target[: source.shape[0], : source.shape[1]].copy_(source)


class Phases(threading.local):
    """A stopwatch with nested phases, one for each thread. Inside of a phase nothing may be awaited."""

    def __init__(self) -> None:  # called by each thread
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = perf_counter()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def take(self) -> dict[str, float]:
        """The seconds of each phase since the last call."""
        self._count()
        taken, self._seconds = self._seconds, {}
        return taken

    def _count(self) -> None:
        now = perf_counter()
        if self._open:
            name = self._open[-1]
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now


phases = Phases()
