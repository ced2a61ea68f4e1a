"""The learner's side of expert routing: compare its choice of experts with the sampler's, or use the sampler's.

A router's scores differ between sampler and learner by rounding, and after an update by more. If another expert is
among the best, the two compute different functions, and the importance ratio of the token is far from 1. With replay
the learner uses the experts that the sampler used ("Rollout Routing Replay", R3). Their weights are the learner's own,
so that the router is trained.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor

from palestra.core.errors import InputError
from palestra.engine.routing import ExpertRouting

RoutingMode = Literal["own", "compare", "replay"]


class RoutingReplay:
    """The experts of one model's passes. A pass without recorded experts uses the model's own choice."""

    def __init__(self, model: Any, mode: RoutingMode) -> None:
        self._routing = ExpertRouting(model)
        self._replays = mode == "replay"
        self._sampled: Tensor | None = None  # [T, layers, k] of the current pass
        self._known: Tensor | None = None  # [T] bool: tokens with recorded experts
        self._differs: dict[int, Tensor] = {}  # by layer, [T] bool

    def use(self) -> AbstractContextManager[None]:
        """Forward and backward passes happen inside; recomputed layers choose as in the forward pass."""
        return self._routing.use(self._choose)

    def start(self, sampled: Tensor | None) -> None:
        """Set the sampler's experts [T, layers, k] of the next pass, in the order in which its tokens are computed."""
        shape = (self._routing.layers, self._routing.per_token)
        if sampled is not None and sampled.shape[1:] != shape:
            raise InputError(
                f"the recorded routing has (layers, experts a token) = {tuple(sampled.shape[1:])}, and the model "
                f"{shape}; rollouts of another model cannot be replayed"
            )
        self._sampled, self._differs = sampled, {}
        self._known = None if sampled is None else sampled[:, 0, 0] != torch.iinfo(sampled.dtype).max

    def _choose(self, layer: int, own: Tensor) -> Tensor:
        if self._sampled is None or self._known is None:
            return own
        sampled = self._sampled[:, layer].long()
        self._differs[layer] = (sampled.sort(-1).values != own.sort(-1).values).any(-1)
        if not self._replays:
            return own
        return torch.where(self._known[:, None], sampled, own)

    def mismatch(self, places: Tensor) -> tuple[Tensor, Tensor] | None:
        """(share of layers with other experts, summed over the tokens at `places`; tokens compared) of the pass."""
        if self._known is None:
            return None
        known = self._known[places]
        share = torch.stack(list(self._differs.values())).double().mean(0)[places]
        return (share * known).sum(), known.sum(dtype=torch.float64)
