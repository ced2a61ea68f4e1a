"""Recurrent layers over packed trees: a prompt's state is computed once, and every completion continues from it.

The root comes first, if there is one; then the prompts, and at last the completions, each in a few calls for rows of
about one length, padded at the end. The states that prompts leave are those after their own tokens. Layers that cannot
tell (`RecurrentLayer.takes_padding`) compute prompts of one length at a time. Gradients of completions reach the prompt
through its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from palestra.algo.batching import Tree, take_rows
from palestra.core.machine import to_device
from palestra.engine.recurrent import Compute, RecurrentLayer, RecurrentLayers, RowStates
from palestra.learner.patches import gradients
from palestra.learner.tree_attention import LAYOUTS, Layout

# The longest row of a call has up to this many times the tokens of its shortest. On a GPU fewer calls make up for more
# padding.
MAX_PADDING, MAX_PADDING_GPU = 1.25, 2.0
MIN_TOKENS = 2  # of a padded row: layers update the state of a single token in place, which autograd does not allow


class _Stretch(NamedTuple):
    """Tokens start..start + length of the packed run; `prompt` is the number of the prompt that they continue."""

    start: int
    length: int
    prompt: int = -1


@dataclass(frozen=True, slots=True)
class _Rows:
    """Stretches that are computed in one call."""

    count: int
    places: Tensor  # [count * longest] the token at each place; padding repeats a stretch's last
    real: Tensor | None  # which places hold a token of their own; None: all
    lengths: Tensor | None  # [count] the tokens of each; None: as many in all
    prompts: Tensor  # [count] whose states they continue; empty: they begin here

    @classmethod
    def of(cls, stretches: Sequence[_Stretch], device: torch.device, shortest: int = 1) -> _Rows:
        starts, lengths = (np.array([s[i] for s in stretches]) for i in (0, 1))
        step = np.arange(max(shortest, lengths.max()))
        places = (starts[:, None] + np.minimum(step, lengths[:, None] - 1)).reshape(-1)
        is_real = (step < lengths[:, None]).reshape(-1)
        prompts = np.array([s.prompt for s in stretches if s.prompt >= 0], np.int64)
        arrays = places, np.flatnonzero(is_real), lengths, prompts
        at, real, tokens, past = to_device(map(torch.from_numpy, arrays), device)
        is_padded = not is_real.all()
        return cls(len(stretches), at, real if is_padded else None, tokens if is_padded else None, past)

    def compute(self, layer: RecurrentLayer, tokens: Tensor, states: RowStates) -> Tensor:
        """[T, H] -> the outputs [n, H] of the stretches' tokens, one stretch after the other."""
        out = layer(tokens.index_select(0, self.places).unflatten(0, (self.count, -1)), states).flatten(0, 1)
        return out if self.real is None else out.index_select(0, self.real)


class TreeRuns:
    """The calls for the trees of one micro-batch, and where their outputs go."""

    def __init__(self, trees: Sequence[Tree], device: torch.device, root: int, takes_padding: bool) -> None:
        padding = MAX_PADDING if device.type == "cpu" else MAX_PADDING_GPU
        begun = [_Stretch(t.start, t.prompt_length, 0 if root else -1) for t in trees if t.prompt_length]
        prompts = list(_of_about_one_length(begun, padding if takes_padding else 1.0))
        numbers = {s.start: number for number, s in enumerate(s for rows in prompts for s in rows)}
        completions = list(_of_about_one_length(_completions(trees, numbers, len(begun) if root else -1), padding))
        roots = [[_Stretch(0, root)]] if root else []
        self.root, self.prompts = ([_Rows.of(rows, device) for rows in kind] for kind in (roots, prompts))
        # nothing continues from completions, so their states may be any
        self.completions = [replace(_Rows.of(rows, device, MIN_TOKENS), lengths=None) for rows in completions]
        stretches = [s for rows in (*roots, *prompts, *completions) for s in rows]
        order_of_tokens = [np.arange(s.start, s.start + s.length) for s in stretches]
        back = np.argsort(np.concatenate(order_of_tokens)) if stretches else np.zeros(0, np.int64)
        self.back = torch.from_numpy(back).to(device)  # [T] where each packed token's output comes


def _completions(trees: Sequence[Tree], numbers: dict[int, int], root: int) -> Iterator[_Stretch]:
    for tree in trees:
        start = tree.start + tree.prompt_length
        for length in tree.completion_lengths:
            if length:
                yield _Stretch(start, length, numbers[tree.start] if tree.prompt_length else root)
            start += length


def _of_about_one_length(stretches: Iterable[_Stretch], padding: float) -> Iterator[list[_Stretch]]:
    """The stretches in batches, up to `padding` times as long as the shortest; those that continue a prompt apart from
    those that do not."""
    batch: list[_Stretch] = []
    for stretch in sorted(stretches, key=lambda s: (s.prompt < 0, s.length)):
        if batch and (stretch.length > padding * batch[0].length or (stretch.prompt < 0) != (batch[0].prompt < 0)):
            yield batch
            batch = []
        batch.append(stretch)
    if batch:
        yield batch


def stack_states(states: Sequence[RowStates]) -> RowStates:
    """The rows of several calls as one."""
    parts = [each.parts for each in states]
    return RowStates.of({part: torch.cat([p[part] for p in parts]) for part in parts[0]} if parts else {}, True)


def select_states(states: RowStates, chosen: Tensor) -> RowStates:
    """The states of some rows, once for each entry of `chosen`; gradients add up."""
    return RowStates.of({part: take_rows(x, chosen) for part, x in states.parts.items()}, states.record_past)


def over_trees(layers: RecurrentLayers, layout_of: Callable[[], Layout], *, in_shards: bool = False) -> Compute:
    """How recurrent layers compute a micro-batch of the learner, for `RecurrentLayers.use`.

    In compiled layers it is one operation, which is computed again in the backward pass. `in_shards`: the layers'
    weights are gathered around each pass, and the compiler leaves it out.
    """
    for layer in layers.layers:
        layer.trained = [weight for weight in layer.module.parameters() if weight.requires_grad]

    def compute(layer: RecurrentLayer, hidden: Tensor) -> Tensor:
        layout = layout_of()
        if torch.compiler.is_compiling():
            out: Tensor = torch.ops.palestra.recurrent_layer(hidden, layer.trained, layer.handle, layout.handle)
            return out
        return _compute(layer, layout, hidden)

    return torch.compiler.disable(compute) if in_shards else compute


def _compute(layer: RecurrentLayer, layout: Layout, hidden: Tensor) -> Tensor:
    if layout.runs is None:
        layout.runs = TreeRuns(layout.trees, layout.device, layout.root, layer.takes_padding)
    runs: TreeRuns = layout.runs
    tokens, outputs = layout.restore(hidden[0]), []

    def compute(rows: _Rows, past: RowStates) -> RowStates:
        """The states after these rows; the past is the states that prompts or the root left."""
        continues = len(rows.prompts) > 0
        states = select_states(past, rows.prompts) if continues else RowStates(record_past=True, begins=True)
        states.lengths = rows.lengths
        outputs.append(rows.compute(layer, tokens, states))
        return states

    roots = [compute(rows, RowStates()) for rows in runs.root]
    at_root = stack_states(roots)
    past = stack_states([*(compute(rows, at_root) for rows in runs.prompts), *roots])  # the root's comes last
    for rows in runs.completions:
        compute(rows, past)
    return layout.reorder(torch.cat(outputs).index_select(0, runs.back))[None]


@torch.library.custom_op("palestra::recurrent_layer", mutates_args=())
def _forward(hidden: Tensor, weights: list[Tensor], layer: Tensor, layout: Tensor) -> Tensor:
    """`weights` are those of the layer that are trained: autograd sees the operation's arguments alone."""
    found = LAYOUTS[layout]
    return _compute(found.recurrent[int(layer)], found, hidden).to(hidden.dtype)


@_forward.register_fake
def _(hidden: Tensor, *_: Any) -> Tensor:
    return hidden.new_empty(hidden.shape)


@torch.library.custom_op("palestra::recurrent_layer_backward", mutates_args=())
def _backward(grad: Tensor, hidden: Tensor, weights: list[Tensor], layer: Tensor, layout: Tensor) -> list[Tensor]:
    found = LAYOUTS[layout]
    own = found.recurrent[int(layer)]
    return [x.contiguous() for x in gradients(partial(_compute, own, found), [hidden], own.trained, grad)]


@_backward.register_fake
def _(grad: Tensor, hidden: Tensor, weights: list[Tensor], *_: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (hidden, *weights)]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    hidden, weights, *handles = inputs
    ctx.save_for_backward(*handles, hidden, *weights)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    layer, layout, hidden, *weights = ctx.saved_tensors
    found, *of_weights = torch.ops.palestra.recurrent_layer_backward(grad, hidden, weights, layer, layout)
    return found, of_weights, None, None


_forward.register_autograd(_differentiate, setup_context=_remember)
