"""Parts of a small model's batch side by side on a CPU: each has a module and gradients of its own, over one set of
weights, and a thread where a processor is free.

The products of a small model are too small to be split among threads; the rows of its batch are not. A batch is divided
the same way on every machine, and the parts' gradients are added in one order, so the sums do not depend on how many
threads there are. Training the demo on two processors takes a tenth less time.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
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

    def __init__(self, model: nn.Module, make_scorer: Callable[[nn.Module], Scorer]) -> None:
        own = {id(p): nn.Parameter(p.data, requires_grad=p.requires_grad) for p in model.parameters()}
        self.pairs = [(p, own[id(p)]) for p in model.parameters()]
        buffers = {id(buffer): buffer for buffer in model.buffers()}
        self.scorer = make_scorer(copy.deepcopy(model, own | buffers).train())

    def shares_weights_with(self, model: nn.Module) -> bool:
        """False once the model was given other tensors, or others of them are trained."""
        return all(
            now is p and p.data_ptr() == own.data_ptr() and p.requires_grad == own.requires_grad
            for now, (p, own) in zip(model.parameters(), self.pairs, strict=True)
        )

    def call(self, work: Work[T], part: int) -> T:
        with self.scorer.session():
            return work(self.scorer, part)

    def move_gradients(self, *, keep: bool) -> None:
        """Add its gradients to those of the model, or discard them."""
        for weight, own in self.pairs:
            if own.grad is not None and keep:
                weight.grad = own.grad if weight.grad is None else weight.grad.add_(own.grad)
            own.grad = None


class Replicas:
    """All parts but the first, which the model itself computes."""

    def __init__(self, model: nn.Module, scorer: Scorer, threads: int | None, **options: Any) -> None:
        """`threads` is what the user allows, None what the machine has."""
        self._model, self._scorer = model, scorer
        self._make_scorer = partial(Scorer, mode=scorer.mode, **options)
        self._made = self._make_all()
        used = torch.get_num_threads()
        allowed = threads or (used if "OMP_NUM_THREADS" in os.environ else processors())
        self._at_once = min(PARTS, max(1, allowed // used))
        self._threads: ThreadPoolExecutor | None = None

    def _make_all(self) -> list[Replica]:
        return [Replica(self._model, self._make_scorer) for _ in range(PARTS - 1)]

    def parts_of(self, batch: Batch) -> int:
        """How many a batch has: one where somebody waits for the gradient of the model's own weights."""
        if any(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) for p in self._model.parameters()):
            return 1
        return max(1, min(PARTS, len(batch.token_ids) // WORTH_A_PART))

    def run(self, work: Work[T], parts: int) -> list[T]:
        """`work` with the scorer and the number of each part, with gradients at the model's weights in the end.

        It is called inside of a session of the model's own scorer. Where one part fails, so do all.
        """
        if not self._made[0].shares_weights_with(self._model):
            self._made = self._make_all()
        replicas, is_done = self._made[: parts - 1], False
        calls: list[Callable[[], T]] = [partial(work, self._scorer, 0)]
        for part, replica in enumerate(replicas, 1):
            calls.append(partial(replica.call, work, part))
        try:
            if self._at_once == 1:
                results = [call() for call in calls]
            else:
                self._threads = self._threads or ThreadPoolExecutor(self._at_once, "palestra-learner-part")
                futures = [self._threads.submit(call) for call in calls]
                wait(futures)
                results = [future.result() for future in futures]
            is_done = True
        finally:
            for replica in replicas:
                replica.move_gradients(keep=is_done)
        return results


def can_be_replicated(model: nn.Module, scorer: Scorer) -> bool:
    """Whether parts of a batch can be computed side by side, and it is worth it.

    Not with dropout, whose generator all threads would share, nor in low precision, in which a sum of parts is another
    one; and the products of a larger model are split among threads themselves.
    """
    parameters = list(model.parameters())
    drops = any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in model.modules())
    return (
        scorer.mode == "trees"
        and scorer.routing is None
        and not (scorer.in_shards or scorer.compiled or scorer.model.is_gradient_checkpointing or drops)
        and all(p.device.type == "cpu" and p.dtype == torch.float32 for p in parameters)
        and sum(p.numel() for p in parameters) < SMALL_MODEL_PARAMETERS
    )
