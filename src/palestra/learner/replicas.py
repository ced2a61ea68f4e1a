"""Parts of a small model's batch side by side on a CPU: each has a module and gradients of its own, over one set of
weights, and a thread where a processor is free.

The products of a small model are too small to be split among threads; the rows of its batch are not. A batch is divided
the same way on every machine, and the parts' gradients are added in one order, so the sums do not depend on how many of
them were computed at once.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from palestra.algo.batch import Batch
from palestra.core.machine import SMALL_MODEL_PARAMETERS, processors
from palestra.learner.forward import Scorer

PARTS = 4  # of a batch
WORTH_A_PART = 512  # tokens
T = TypeVar("T")
Work = Callable[[Scorer, int], T]


class Replica:
    """A module that shares its weights with another one, but not its gradients."""

    def __init__(self, model: nn.Module, scorer_of: Callable[[nn.Module], Scorer]) -> None:
        own = {id(p): nn.Parameter(p.data, requires_grad=p.requires_grad) for p in model.parameters()}
        self._pairs = [(p, own[id(p)]) for p in model.parameters()]
        buffers = {id(buffer): buffer for buffer in model.buffers()}
        self.scorer = scorer_of(copy.deepcopy(model, own | buffers).train())

    def is_of(self, model: nn.Module) -> bool:
        """False once the model was given other tensors, or others of them are trained."""
        return all(
            now is p and p.data_ptr() == own.data_ptr() and p.requires_grad == own.requires_grad
            for now, (p, own) in zip(model.parameters(), self._pairs, strict=True)
        )

    def call(self, work: Work[T], part: int) -> T:
        with self.scorer.session():
            return work(self.scorer, part)

    def add_gradients(self) -> None:
        """To those of the model."""
        for weight, own in self._pairs:
            if own.grad is not None:
                weight.grad = own.grad if weight.grad is None else weight.grad.add_(own.grad)
        self.forget_gradients()

    def forget_gradients(self) -> None:
        for _, own in self._pairs:
            own.grad = None


class Replicas:
    """All parts but the first, which the model itself computes."""

    def __init__(self, model: nn.Module, scorer: Scorer, threads: int | None, **options: Any) -> None:
        """`threads` is what the user allows, None what the machine has."""
        self._model, self._scorer = model, scorer
        routers = None if scorer.routing is None else scorer.routing.routers
        self._scorer_of = partial(Scorer, mode=scorer.mode, routers=routers, **options)
        self._made: list[Replica] = []
        used = torch.get_num_threads()
        allowed = threads or (used if "OMP_NUM_THREADS" in os.environ else processors())
        self._at_once = min(PARTS, max(1, allowed // used))
        self._threads: ThreadPoolExecutor | None = None

    def parts_of(self, batch: Batch) -> int:
        """How many a batch has: one where somebody waits for the gradient of the model's own weights."""
        if any(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) for p in self._model.parameters()):
            return 1
        return max(1, min(PARTS, len(batch.token_ids) // WORTH_A_PART))

    def run(self, work: Work[T], parts: int) -> list[T]:
        """`work` with the scorer and the number of each part, with gradients at the model's weights in the end.

        It is called inside of a session of the model's own scorer. Where one part fails, so does all.
        """
        replicas = self._replicas(parts - 1)
        others = (partial(replica.call, work, 1 + i) for i, replica in enumerate(replicas))
        try:
            found = self._all([partial(work, self._scorer, 0), *others])
        except BaseException:
            for replica in replicas:
                replica.forget_gradients()
            raise
        for replica in replicas:
            replica.add_gradients()
        return found

    def _all(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        if self._at_once == 1 or len(calls) == 1:
            return [call() for call in calls]
        self._threads = self._threads or ThreadPoolExecutor(self._at_once, "palestra-learner-part")
        futures = [self._threads.submit(call) for call in calls]
        wait(futures)
        return [future.result() for future in futures]

    def _replicas(self, count: int) -> list[Replica]:
        if not all(replica.is_of(self._model) for replica in self._made):
            self._made = []
        while len(self._made) < count:
            self._made.append(Replica(self._model, self._scorer_of))
        return self._made[:count]


def can_be_replicated(model: nn.Module, scorer: Scorer) -> bool:
    """Whether parts of a batch can be computed side by side, and it is worth it.

    Not with dropout, whose generator all threads would share, nor in low precision, in which a sum of parts is another
    one; and the products of a larger model are split among threads themselves.
    """
    parameters = list(model.parameters())
    drops = any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in model.modules())
    return (
        scorer.mode == "trees"
        and not (scorer.in_shards or scorer.compiled or scorer.model.is_gradient_checkpointing or drops)
        and all(p.device.type == "cpu" and p.dtype == torch.float32 for p in parameters)
        and sum(p.numel() for p in parameters) < SMALL_MODEL_PARAMETERS
    )
