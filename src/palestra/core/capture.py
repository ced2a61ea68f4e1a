"""CUDA graphs are captured one at a time: sampler and learner may have a thread each, and a capture begins by
synchronising the GPU, which could break another one in progress."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_one_at_a_time = Lock()


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """What is launched inside becomes part of the graph; other threads may use the GPU meanwhile."""
    import torch

    with _one_at_a_time, torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        yield
