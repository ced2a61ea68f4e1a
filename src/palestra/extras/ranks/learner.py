"""The learner over several ranks: each computes its rows on its shard of the model (FSDP2), with the normalisers of the
whole step, so that loss, gradient and update are those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from palestra.algo.batch import Batch
from palestra.algo.losses import TokenStats
from palestra.algo.step_loss import Loss
from palestra.core.config import RunConfig
from palestra.core.errors import InputError
from palestra.core.ranks import Ranks
from palestra.core.types import Array
from palestra.core.weights import Weights
from palestra.extras.ranks.sharding import load_sharded, load_whole, save_sharded
from palestra.learner import state as learner_state
from palestra.learner.base import noop
from palestra.learner.local import LocalLearner, LocalOutputs


def share_of_rows(batch: Batch, ranks: Ranks) -> tuple[int, int]:
    """The first of this rank's rows and of the next rank's: runs of rows with about as many tokens each."""
    lengths = batch.lengths
    middles = lengths.cumsum() - lengths / 2
    bounds = [int(np.searchsorted(middles, lengths.sum() * r / ranks.size)) for r in range(ranks.size)]
    return bounds[ranks.rank], [*bounds, batch.rows][ranks.rank + 1]


@dataclass(slots=True)
class GatheredOutputs:
    """The results of all ranks for their rows. Every rank asks for them."""

    own: LocalOutputs
    ranks: Ranks
    _all: list[Any] = field(default_factory=list)

    def logprobs(self) -> Array:
        return np.concatenate([found["logprobs"] for found in self._gathered()])

    def entropies(self) -> Array:
        return np.concatenate([found["entropies"] for found in self._gathered()])

    def metrics(self) -> dict[str, float]:
        found = self._gathered()
        terms = reduce(add, (torch.tensor(each["terms"]) for each in found))
        stats = reduce(add, (TokenStats(**each["stats"]).each(torch.tensor) for each in found))
        metrics = self.own.loss.metrics(terms, stats)
        metrics["tokens_computed"] = sum(f["tokens_computed"] for f in found)
        if peaks := [f["peak_memory_gib"] for f in found if "peak_memory_gib" in f]:
            metrics["peak_memory_gib"] = max(peaks)
        return metrics

    def _gathered(self) -> list[Any]:
        if not self._all:
            own = self.own
            found = {"terms": _array(own.terms), "stats": own.stats.each(_array), **own.costs()}
            found |= {"logprobs": own.logprobs(), "entropies": own.entropies()}
            self._all = self.ranks.gather(found, dict[str, Any])
        return self._all


def _array(tensor: Tensor) -> Array:
    return tensor.cpu().numpy()


class FsdpLearner:
    """Trains one model on all ranks. `model` stays whole, for samplers and files, and gets the weights after each step.

    Each rank holds the model once and its shard of what is trained, with the optimizer's state, in float32.
    """

    def __init__(self, model: Any, *, config: RunConfig, ranks: Ranks, pad_token_id: int = 0) -> None:
        self.model = model
        frozen = {id(p): p for p in model.parameters() if not p.requires_grad}
        trained = copy.deepcopy(model, dict(frozen))
        self._ranks = ranks
        own = sum(float(p.detach().double().sum()) for p in trained.parameters() if p.requires_grad)
        sums = ranks.gather(own, float)
        if len(set(sums)) > 1:
            raise InputError(
                f"the ranks have loaded different weights (their sums are {', '.join(map(str, sums))}); give all "
                "machines the same model folder, and the same versions of torch and transformers"
            )
        self._parts: WeakKeyDictionary[Batch, Batch] = WeakKeyDictionary()
        self._local = LocalLearner(trained, config=config, pad_token_id=pad_token_id, ranks=ranks)

    def forward(self, batch: Batch, *, reference: bool = False) -> Array:
        own = self._local.forward(self._own_rows(batch), reference=reference)
        return np.concatenate(self._ranks.gather(own, np.ndarray))

    def forward_backward(self, batch: Batch, loss: Loss) -> GatheredOutputs:
        return GatheredOutputs(self._local.forward_backward(self._own_rows(batch), loss), self._ranks)

    def optim_step(self, learning_rate: float, *, max_grad_norm: float, host_work: Callable[[], None] = noop) -> float:
        return self._local.optim_step(learning_rate, max_grad_norm=max_grad_norm, host_work=host_work)

    @torch.no_grad()
    def weights(self, version: int) -> Weights:
        """Gather the shards of all ranks into `model`, which the sampler uses."""
        own = dict(self.model.named_parameters())
        names, shards = self._local.optimizer.names, self._local.optimizer.weights
        for name, weight in zip(names, shards, strict=True):
            own[name].copy_(weight.full_tensor())  # type: ignore[attr-defined]

        def trained() -> dict[str, Tensor]:
            return {name: own[name].detach() for name in names}

        return Weights(version, trained, self.model)

    def save(self, folder: Path) -> None:
        """Each rank writes its shards; the first also the model, so that the checkpoint can be loaded as one."""
        own = learner_state.random_states()
        arrays = self._ranks.gather([*map(_array, [own["cpu"], *own["cuda"]])], list[np.ndarray])
        # all have gathered, so the folder is there for all
        save_sharded(folder, self._local.optimizer)
        self.weights(0)
        states = [list(map(torch.tensor, each)) for each in arrays]
        whole = {"random_of_ranks": [{"cpu": cpu, "cuda": cuda} for cpu, *cuda in states]}
        self._ranks.from_first(lambda: learner_state.save(folder, self.model, whole))  # a failure is known to all

    def load(self, folder: Path) -> None:
        """Read what any number of ranks saved, or one process."""
        state = learner_state.read(folder)
        if (folder / learner_state.SHARDS).is_dir():
            load_sharded(folder, self._local.optimizer)
        else:
            learner_state.load_model(folder, self.model)
            whole = dict(self.model.named_parameters())
            names = self._local.optimizer.names
            load_whole(self._local.optimizer, state["optimizer"], {name: whole[name].detach() for name in names})
        states = state.get("random_of_ranks", [])
        same = len(states) == self._ranks.size
        learner_state.set_random_states(states[self._ranks.rank] if same else state["random"])
        self.weights(0)

    def export(self, folder: Path) -> Path:
        self.weights(0)
        if self._ranks.is_first:
            folder.mkdir(parents=True, exist_ok=True)
            learner_state.save_model(folder, self.model)
        self._ranks.gather(None)  # no rank goes on before the files are there
        return folder

    def _own_rows(self, batch: Batch) -> Batch:
        """This rank's part of a batch; kept between passes, since the learner packs it once."""
        part = batch.part(*share_of_rows(batch, self._ranks))
        own = self._parts.setdefault(batch, part)
        own.old_logprobs, own.ref_logprobs = part.old_logprobs, part.ref_logprobs
        return own
