"""A model that is only scored with: the teacher of a distillation."""

from __future__ import annotations

import copy
from collections import deque
from functools import partial
from typing import Any

import torch
from torch import Tensor

from palestra.algo.batch import Batch
from palestra.core.config import RunConfig
from palestra.core.types import Array
from palestra.engine.supported import base_model
from palestra.learner.forward import Scorer
from palestra.learner.micro_batches import (
    MicroBatchLimit,
    PackedMicroBatch,
    micro_batch_tokens,
    pack_batch,
    tokens_to_column,
    unless_out_of_memory,
)


class FrozenModel:
    """Log-probabilities under weights that no step changes, at the temperature that the learner scores with."""

    def __init__(self, model: Any, *, config: RunConfig, pad_token_id: int = 0) -> None:
        self.model = model.requires_grad_(False).eval()
        options: dict[str, Any] = {"temperature": config.rollout.temperature, "pad_token_id": pad_token_id}
        self._scorer = Scorer(model, compile_layers=False, **options)
        self._device = next(model.parameters()).device
        whole_logits = self._scorer.mode == "reference"
        tokens = micro_batch_tokens(config, base_model(model).config, self._device, whole_logits=whole_logits)
        self._limit = MicroBatchLimit(tokens)

    @classmethod
    def copy_of(cls, model: Any, *, config: RunConfig, pad_token_id: int = 0) -> FrozenModel:
        """A model as it is now. Weights that are not trained, such as those under an adapter, are shared with it."""
        shared = {id(p): p for p in model.parameters() if not p.requires_grad}
        return cls(copy.deepcopy(model, shared), config=config, pad_token_id=pad_token_id)

    @torch.no_grad()
    def forward(self, batch: Batch) -> Array:
        """[T] log-probabilities of the batch's tokens, or [M] of its targets."""
        parts: list[tuple[PackedMicroBatch, Tensor]] = []
        waiting = self._pack(batch)
        with self._scorer.session(training=False):
            while waiting:
                micro = waiting.popleft()
                scored = unless_out_of_memory(partial(self._scorer, micro))
                if scored is not None:
                    each = micro.batch.each
                    parts.append((micro, scored[0] if each is None else scored[0].index_select(0, each)))
                    continue
                self._limit.halve(len(micro.batch.token_ids), len(set(micro.batch.row.tolist())))
                waiting = self._pack(batch, {row for m in (micro, *waiting) for row in m.batch.row.tolist()})
        self._limit.log_reduction()
        return tokens_to_column(parts, batch)

    def _pack(self, batch: Batch, rows: set[int] | None = None) -> deque[PackedMicroBatch]:
        packed = pack_batch(
            batch,
            max_tokens=self._limit.tokens,
            share_prefix=self._scorer.shares_prefix,
            echo=False,
            device=self._device,
            rows=rows,
        )
        return deque(packed.micro_batches)
