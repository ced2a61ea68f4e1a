"""Recurrent layers over packed trees: a prompt's state is computed once, and every completion continues from it.

Prompts of one length are computed together, without padding, since padding would change their state. Completions of
about one length follow, padded at the end, where it changes nothing that is read. Gradients of completions reach the
prompt through its state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from palestra.algo.batching import Tree
from palestra.engine.recurrent import Call, RowStates, select_states, stack_states
from palestra.learner.tree_attention import Layout

MAX_PADDING = 1.25  # times the length of the shortest completion of a batch
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
    prompts: Tensor | None  # [count] whose states they continue; None: they begin here

    @classmethod
    def of(cls, stretches: Sequence[_Stretch], device: torch.device, longest: int) -> _Rows:
        starts, lengths = (np.array([s[i] for s in stretches]) for i in (0, 1))
        step = np.arange(longest)
        places = (starts[:, None] + np.minimum(step, lengths[:, None] - 1)).reshape(-1)
        is_real = (step < lengths[:, None]).reshape(-1)
        real = None if is_real.all() else torch.from_numpy(np.flatnonzero(is_real)).to(device)
        prompts = torch.tensor([s.prompt for s in stretches], device=device) if stretches[0].prompt >= 0 else None
        return cls(len(stretches), torch.from_numpy(places).to(device), real, prompts)

    def call(self, call: Call, tokens: Tensor, states: RowStates) -> Tensor:
        """[T, H] -> the outputs [n, H] of the stretches' tokens, one stretch after the other."""
        out = call(tokens.index_select(0, self.places).unflatten(0, (self.count, -1)), states).flatten(0, 1)
        return out if self.real is None else out.index_select(0, self.real)


class TreeRuns:
    """The calls for the trees of one micro-batch, and where their outputs go."""

    def __init__(self, trees: Sequence[Tree], device: torch.device) -> None:
        prompts = sorted((_Stretch(t.start, t.prompt_length) for t in trees if t.prompt_length), key=lambda s: s.length)
        numbers = {stretch.start: number for number, stretch in enumerate(prompts)}
        completions = sorted(_completions(trees, numbers), key=lambda s: (s.prompt < 0, s.length))
        self.prompts = [
            _Rows.of(list(alike), device, length) for length, alike in groupby(prompts, key=lambda s: s.length)
        ]
        self.completions = [
            _Rows.of(alike, device, max(MIN_TOKENS, alike[-1].length)) for alike in _of_about_one_length(completions)
        ]
        order = [np.arange(s.start, s.start + s.length) for s in (*prompts, *completions)]
        back = np.argsort(np.concatenate(order)) if order else np.zeros(0, np.int64)
        self.back = torch.from_numpy(back).to(device)  # [T] where each packed token's output comes


def _completions(trees: Sequence[Tree], numbers: dict[int, int]) -> Iterator[_Stretch]:
    for tree in trees:
        start = tree.start + tree.prompt_length
        for length in tree.completion_lengths:
            if length:
                yield _Stretch(start, length, numbers[tree.start] if tree.prompt_length else -1)
            start += length


def _of_about_one_length(stretches: Sequence[_Stretch]) -> Iterator[list[_Stretch]]:
    """Sorted stretches in batches; those that continue a prompt apart from those that do not."""
    batch: list[_Stretch] = []
    for stretch in stretches:
        if batch and (stretch.length > MAX_PADDING * batch[0].length or (stretch.prompt < 0) != (batch[0].prompt < 0)):
            yield batch
            batch = []
        batch.append(stretch)
    if batch:
        yield batch


def over_trees(layout_of: Callable[[], Layout]) -> Callable[[int, Tensor, Call], Tensor]:
    """How recurrent layers compute a micro-batch of the learner, for `RecurrentLayers.use`."""

    @torch.compiler.disable  # it walks the trees, which differ from one micro-batch to the next
    def compute(layer: int, hidden: Tensor, call: Call) -> Tensor:
        layout = layout_of()
        if layout.runs is None:
            layout.runs = TreeRuns(layout.trees, layout.device)
        runs: TreeRuns = layout.runs
        tokens, outputs, states = layout.restore(hidden[0]), [], []
        for rows in runs.prompts:
            states.append(RowStates(record_past=True, begins=True))
            outputs.append(rows.call(call, tokens, states[-1]))
        after_prompts = stack_states(states)
        for rows in runs.completions:
            begin = RowStates(record_past=True, begins=True)
            before = begin if rows.prompts is None else select_states(after_prompts, rows.prompts)
            outputs.append(rows.call(call, tokens, before))
        return layout.reorder(torch.cat(outputs).index_select(0, runs.back))[None]

    return compute
