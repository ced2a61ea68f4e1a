"""Recurrent layers over packed trees: a prompt's state is computed once, and every completion continues from it.

The root comes first, if there is one; then the prompts, and at last the completions, each in a few calls for rows of
about one length, padded at the end. The states that prompts leave are those after their own tokens. Layers that cannot
tell (`RecurrentLayer.takes_padding`) compute prompts of one length at a time. Gradients of completions reach the prompt
through its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from palestra.algo.batching import Run, Tree, take_rows
from palestra.engine.recurrent import Compute, RecurrentLayer, RecurrentLayers, RowStates
from palestra.learner.compiled_layers import LAYOUTS, WALKS
from palestra.learner.tree_attention import Layout, Runs, of_about_one_length

# The longest row of a call has up to this many times the tokens of its shortest. On a GPU fewer calls make up for more
# padding.
MAX_PADDING, MAX_PADDING_GPU = 1.25, 2.0
MIN_TOKENS = 2  # of a padded row: layers update the state of a single token in place, which autograd does not allow


class TreeRuns:
    """The calls for the trees of one micro-batch, and where their outputs go."""

    def __init__(self, trees: Sequence[Tree], device: torch.device, root: int, takes_padding: bool) -> None:
        padding = MAX_PADDING if device.type == "cpu" else MAX_PADDING_GPU
        begun = [Run(t.start, t.prompt_length, 0 if root else -1) for t in trees if t.prompt_length]
        prompts = list(of_about_one_length(begun, padding if takes_padding else 1.0))
        numbers = {run.start: number for number, run in enumerate(run for rows in prompts for run in rows)}
        completions = list(of_about_one_length(_completions(trees, numbers, len(begun) if root else -1), padding))
        roots = [[Run(0, root)]] if root else []
        self.root, self.prompts = ([Runs.of(rows, device) for rows in kind] for kind in (roots, prompts))
        # nothing continues from completions, so their states may be any
        self.completions = [replace(Runs.of(rows, device, MIN_TOKENS), lengths=None) for rows in completions]
        order_of_tokens = [
            np.arange(r.start, r.start + r.length) for rows in (*roots, *prompts, *completions) for r in rows
        ]
        back = np.argsort(np.concatenate(order_of_tokens)) if order_of_tokens else np.zeros(0, np.int64)
        self.back = torch.from_numpy(back).to(device)  # [T] where each packed token's output comes


def _completions(trees: Sequence[Tree], numbers: dict[int, int], root: int) -> Iterator[Run]:
    for tree in trees:
        for run in tree.runs[bool(tree.prompt_length) :]:
            yield run._replace(past=numbers[tree.start] if tree.prompt_length else root)


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
            handles = [layer.handle, layout.handle]
            out: Tensor = torch.ops.palestra.walk_trees("recurrence", [hidden], layer.trained, handles, [])
            return out
        return _compute(layer, layout, hidden)

    return torch.compiler.disable(compute) if in_shards else compute


def _compute(layer: RecurrentLayer, layout: Layout, hidden: Tensor) -> Tensor:
    if layout.runs is None:
        layout.runs = TreeRuns(layout.trees, layout.device, layout.root, layer.takes_padding)
    runs: TreeRuns = layout.runs
    tokens, outputs = layout.restore(hidden[0]), []

    def compute(rows: Runs, past: RowStates) -> RowStates:
        """The states after these rows; the past is the states that prompts or the root left."""
        continues = len(rows.past) > 0
        states = select_states(past, rows.past) if continues else RowStates(record_past=True, begins=True)
        states.lengths = rows.lengths
        outputs.append(rows.flat(layer(rows.rows(tokens), states)))
        return states

    roots = [compute(rows, RowStates()) for rows in runs.root]
    at_root = stack_states(roots)
    past = stack_states([*(compute(rows, at_root) for rows in runs.prompts), *roots])  # the root's comes last
    for rows in runs.completions:
        compute(rows, past)
    return layout.reorder(torch.cat(outputs).index_select(0, runs.back))[None]


def _walk(handles: list[Tensor], constants: list[float]) -> tuple[Callable[..., Tensor], Sequence[Tensor]]:
    layout = LAYOUTS[handles[1]]
    layer = layout.recurrent[int(handles[0])]
    return partial(_compute, layer, layout), layer.trained


WALKS["recurrence"] = _walk
