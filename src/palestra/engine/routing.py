"""Routing of mixture-of-experts models: which experts each router chooses for each token.

Families write their routers differently, but each of them chooses by one `topk` over the experts. A probe finds the
modules that make this call. For the length of a pass their `topk` returns the choice of a given function instead: the
sampler records the model's own choice, and the learner may replace it. The router computes the weights of the chosen
experts as always, from its own scores at these places, so that gradients reach it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from palestra.core.errors import InputError, UnsupportedModel
from palestra.core.types import Array
from palestra.engine.attention import ModulePatches, plain_forward

EXPERTS = "experts"  # the name that all families give to the module of the experts
TOPK = (torch.topk, Tensor.topk)
RoutingMode = Literal["own", "compare", "replay"]
# layer and the router's own choice [T, k] -> the choice to use
Choose = Callable[[int, Tensor], Tensor]


class ExpertRouting:
    """The routers of a model, in the order of its layers; UnsupportedModel for a model without them."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config(decoder=True)
        self.experts = expert_count(config)
        self.dtype = torch.uint8 if self.experts < torch.iinfo(torch.uint8).max else torch.int16
        blocks = [module for module in model.modules() if EXPERTS in module._modules]
        if not self.experts or not blocks:
            raise UnsupportedModel(f"{config.model_type} has no experts; leave train.expert_routing at own")
        self.unknown = torch.iinfo(self.dtype).max  # in place of the experts of a token whose routing is not known
        # The router is the module of each block that calls `topk` once in a pass over two tokens.
        candidates = [
            module
            for block in blocks
            for module in (*(child for key, child in block._modules.items() if key != EXPERTS and child), block)
        ]
        calls: list[list[int]] = [[] for _ in candidates]  # of each candidate: experts that were chosen

        def note(number: int, own: Tensor) -> Tensor:
            calls[number].append(own.shape[-1])
            return own

        ids = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
        with torch.no_grad(), self._patched(candidates, note):
            plain_forward(model, ids, use_cache=False)
        self.modules: list[nn.Module] = []
        self.per_token = 0
        for block in blocks:
            own = [number for number, module in enumerate(candidates) if module in (block, *block._modules.values())]
            router = next((number for number in own if len(calls[number]) == 1), None)
            if router is None or self.per_token not in (0, calls[router][0]):
                raise UnsupportedModel(
                    f"{config.model_type} chooses experts in a way that cannot be recorded; leave "
                    "train.expert_routing at own"
                )
            self.modules.append(candidates[router])
            self.per_token = calls[router][0]
        self.layers = len(self.modules)

    def use(self, choose: Choose) -> AbstractContextManager[None]:
        """Let `choose(layer, own)` decide which experts each router uses; the modules are as before afterwards."""
        return self._patched(self.modules, choose)

    @contextmanager
    def record(self) -> Iterator[list[Tensor]]:
        """Collect the choice [T, k] of each layer in one pass."""
        choices: list[Tensor] = []

        def note(layer: int, own: Tensor) -> Tensor:
            choices.append(own.to(self.dtype))
            return own

        with self.use(note):
            yield choices

    @contextmanager
    def _patched(self, modules: Sequence[nn.Module], choose: Choose) -> Iterator[None]:
        with ModulePatches() as patches:
            for number, module in enumerate(modules):
                patches.set(module, "forward", _with_choice(module.forward, _TopK(number, self.experts, choose)))
            yield


def expert_count(config: Any) -> int:
    """Number of experts of each layer; 0 for a dense model."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((count for name in names if (count := getattr(config, name, None))), 0)


def _with_choice(forward: Callable[..., Any], top_k: _TopK) -> Callable[..., Any]:
    """A module's forward in which `topk` over the experts returns the given choice."""

    def chosen(*args: Any, **kwargs: Any) -> Any:
        with top_k:
            return forward(*args, **kwargs)

    return chosen


class _TopK(TorchFunctionMode):
    def __init__(self, layer: int, experts: int, choose: Choose) -> None:
        super().__init__()
        self._layer, self._experts, self._choose = layer, experts, choose

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in TOPK or not args:
            return found
        scores = args[0]  # groups of experts, from which some families choose first, have other shapes
        if scores.dim() != 2 or scores.shape[-1] != self._experts:
            return found
        chosen = self._choose(self._layer, found.indices)
        if chosen is found.indices:
            return found
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


class RoutingRecord:
    """The experts of a session's first tokens. A token keeps the first entry: the one that it was sampled on with.

    Entries may be on their way from the device until the step that made them is collected.
    """

    __slots__ = ("_parts", "_taken", "length")

    def __init__(self) -> None:
        self._parts: list[Tensor] = []  # [tokens, layers, k] each
        self._taken = 0  # of the parts, those that earlier turns have
        self.length = 0

    def add(self, start: int, rows: Tensor) -> None:
        """Add the experts of the tokens from `start` on, of which the first may be known."""
        assert start <= self.length, "tokens before these have no routing"
        if start + len(rows) > self.length:
            self._parts.append(rows[self.length - start :])
            self.length = start + len(rows)

    def inherit(self, other: RoutingRecord, length: int) -> None:
        """Take over what is missing of the first `length` tokens from a session that begins with them."""
        start = 0
        for part in other._parts:
            if start >= length:
                break
            if start + len(part) > self.length:
                self.add(max(start, self.length), part[max(0, self.length - start) : length - start])
            start += len(part)

    def truncate(self, length: int) -> None:
        """Forget tokens that are not part of the session any more."""
        while self.length > length:
            last = self._parts.pop()
            self.length -= len(last)
            if self.length < length:
                self.add(self.length, last[: length - self.length])
        self._taken = min(self._taken, len(self._parts))

    def take(self, length: int, unknown: int) -> Array | None:
        """[n, layers, k] of the tokens since the last call up to `length`; `unknown` where they are not recorded."""
        if len(self._parts) == self._taken:
            return None
        new = torch.cat(self._parts[self._taken :]) if len(self._parts) > self._taken + 1 else self._parts[-1].clone()
        self._parts[self._taken :] = [new]
        self._taken = len(self._parts)
        rows: Array = new.numpy()
        missing = length - self.length
        if missing > 0:
            rows = np.concatenate([rows, np.full((missing, *rows.shape[1:]), unknown, rows.dtype)])
        return rows


class RoutingReplay:
    """Compare the learner's choice of experts with the sampler's, or replay the sampler's, in one model's passes.

    A router's scores differ between sampler and learner by rounding, and after an update by more. If another expert is
    among the best, the two compute different functions, and the importance ratio of the token is far from 1. With
    replay the learner uses the experts that the sampler used ("Rollout Routing Replay", R3). Their weights are the
    learner's own, so that the router is trained. A pass without recorded experts uses the model's own choice.
    """

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
