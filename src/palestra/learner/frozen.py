"""A model that no step changes: the reference of a loss, or a teacher."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from palestra.algo.batch import Batch
from palestra.algo.batching import MicroBatch, tokens_to_column
from palestra.core.config import RunConfig
from palestra.core.types import Array
from palestra.engine.supported import base_model
from palestra.learner.forward import Scorer
from palestra.learner.micro_batches import MicroBatchLimit, micro_batch_tokens, rows_of, score_all
from palestra.learner.tree_attention import pack_batch


class FrozenModel:
    """Log-probabilities under weights that no step changes, at the temperature that the learner scores with."""

    def __init__(self, model: Any, *, config: RunConfig, pad_token_id: int = 0) -> None:
        self.model = model.requires_grad_(False).eval()
        temperature = config.rollout.temperature
        self._scorer = Scorer(model, compile_layers=False, temperature=temperature, pad_token_id=pad_token_id)
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

        def pack(rows: set[int] | None = None) -> list[MicroBatch]:
            scorer = self._scorer
            options: dict[str, Any] = {"share_prefix": scorer.shares_prefix, "min_root": scorer.min_root}
            options |= {"max_tokens": self._limit.tokens, "rows": rows}
            return pack_batch(batch, echo=False, device=self._device, **options)

        def smaller(micros: Sequence[MicroBatch]) -> list[MicroBatch]:
            self._limit.halve(micros[0])
            return pack(rows_of(micros))

        def score(micro: MicroBatch) -> Tensor:
            return micro.of_each(self._scorer(micro)[0])

        parts = score_all(self._scorer, score, pack(), smaller)
        if self._limit.lowered_from is not None:
            self._limit.log_reduction()
        return tokens_to_column(parts, batch)
