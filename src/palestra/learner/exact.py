"""The learner's forward pass of `model.exact`: the sampler's kernels over packed rows, so that both give the same bits.

Gradients are those of the model's own layers, each computed once more from the states that it was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from palestra.algo.batching import Tree
from palestra.core.errors import UnsupportedModel
from palestra.core.machine import to_device
from palestra.core.types import Array
from palestra.engine.cuda.exact import ExactPlan
from palestra.engine.cuda.fast_decoder import CudaFastDecoder, norm
from palestra.engine.cuda.paged_ops import padded_tables
from palestra.engine.supported import NO_EXACT, adapter_of, is_llama_like
from palestra.learner.tree_attention import Layout


class ExactForward:
    """Runs a decoder's layers over packed rows."""

    def __init__(self, model: Any) -> None:
        if not is_llama_like(model):
            raise UnsupportedModel(f"model.exact has no kernels for {type(model).__name__}; {NO_EXACT}")
        if adapter_of(model.get_output_embeddings()) is not None:
            raise UnsupportedModel(
                "model.exact takes no adapter of the output layer; leave lm_head out of lora.modules"
            )
        self.model = model
        self._decoder = CudaFastDecoder(model, model.config.max_position_embeddings, exact=True)
        self._weights_at = self._addresses()
        self._anchor = torch.zeros((), device=model.device, requires_grad=True)  # else autograd leaves the pass out

    def _addresses(self) -> list[int]:
        return [weight.data_ptr() for weight in self.model.parameters()]

    def refresh(self) -> None:
        """To be called after weights have changed, or were moved."""
        if self._weights_at != (now := self._addresses()):
            self._decoder.find_weights()
            self._weights_at = now
        self._decoder.refresh_adapters()

    def hidden(self, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """[T, H] the states that the output layer reads, of tokens in the layout's order."""
        found: Tensor = _Hidden.apply(self._anchor, self, ids, positions, layout)
        return found

    @torch.no_grad()
    def run(self, ids: Tensor, positions: Tensor, layout: Layout) -> tuple[Tensor, list[Tensor]]:
        """The same, and what each layer was given."""
        decoder, states = self._decoder, list[Tensor]()
        attend = decoder.attend_with(self._plan(ids, positions, layout))
        x = F.embedding(ids, self.model.model.embed_tokens.weight)
        for layer in decoder.layers:
            states.append(x.clone())
            decoder.run_layer(layer, x, attend)
        states.append(x)
        return norm(self.model.model.norm, x), states

    def backward(self, gradient: Tensor, states: list[Tensor], ids: Tensor, positions: Tensor, layout: Layout) -> None:
        """Add to the weights' gradients; `gradient` is that of the states that the output layer reads."""
        body = self.model.model
        options: dict[str, Any] = {"attention_mask": None, "use_cache": False, "position_ids": positions[None]}
        options["position_embeddings"] = body.rotary_emb(states[0][None], positions[None])
        gradient = _through(body.norm, states.pop(), gradient)
        for layer in reversed(body.layers):
            gradient = _through(layer, states.pop()[None], gradient[None], **options, layout=layout)[0]
        if body.embed_tokens.weight.requires_grad:
            with torch.enable_grad():
                torch.autograd.backward(body.embed_tokens(ids), gradient)

    def _plan(self, ids: Tensor, positions: Tensor, layout: Layout) -> ExactPlan:
        """Every token is a page, and every row a table of its own and its prompt's tokens."""
        tables, rows = (torch.from_numpy(x) for x in paths(layout.trees))
        tables, rows = to_device((tables, rows), ids.device)
        if layout.is_reordered:
            tables = layout.bounds.place[tables.long()].int()
        shape = (len(self._decoder.layers), len(ids), self._decoder.kv_heads, 1, self._decoder.head_dim)
        store = self.model.model.embed_tokens.weight.new_empty(2, *shape[1:])
        pages = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
        keys, values = (one.expand(shape) for one in store)  # of one layer after the other
        return ExactPlan(keys, values, tables, ids, positions.int(), pages, layout.reorder(rows))


class _Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, exact: ExactForward, *batch: Any) -> Tensor:
        found, states = exact.run(*batch)
        ctx.exact, ctx.batch, ctx.states = exact, batch, states
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        states, ctx.states = ctx.states, []
        ctx.exact.backward(grads[0], states, *ctx.batch)
        return (None,) * (2 + len(ctx.batch))


def _through(module: Any, state: Tensor, gradient: Tensor, **options: Any) -> Tensor:
    """Go back through a module from what it was given: add to its weights' gradients, and give that of its input."""
    with torch.enable_grad():
        state = state.detach().requires_grad_()
        out = module(state, **options)
        torch.autograd.backward(out[0] if isinstance(out, tuple) else out, gradient)
    assert state.grad is not None
    return state.grad


def paths(trees: Sequence[Tree]) -> tuple[Array, Array]:
    """([rows, longest] the tokens of each row, prompt first, [T] the row of each token); rows share their prompt.

    >>> paths([Tree(start=0, prompt_length=2, completion_lengths=(1, 2))])[0].tolist()
    [[0, 1, 2, 0], [0, 1, 3, 4]]
    """
    rows: list[list[int]] = []
    of_tokens: list[int] = []
    for tree in trees:
        prompt, end = list(range(tree.start, tree.start + tree.prompt_length)), tree.start + tree.prompt_length
        of_tokens += [len(rows)] * len(prompt)
        for length in tree.completion_lengths or (0,):
            of_tokens += [len(rows)] * length
            rows.append(prompt + list(range(end, end + length)))
            end += length
    return padded_tables(rows), np.array(of_tokens, np.int32)
