"""Micro-batches padded to few shapes: what is captured for one of them serves many others.

Padding tokens are trees of their own, which no real token sees, so they change no number and get no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import chain

# How much padding a known shape may mean for a micro-batch: a share of its tokens, plus so many. Else one is made.
WASTED_SHARE, WASTED_TOKENS = 0.3, 4096
# What a new shape has beyond its micro-batch, for later ones that are larger: a share of it, at most so many.
ROOM, MOST_ROOM = 0.2, 1024
SPARE_KEYS = 64  # padding prompts have at least so many tokens: each padding completion needs one to look at
SHORTEST_RUN = 128  # what attention computes at once; telling shorter ones apart saves nothing


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of the runs of a micro-batch, in tokens."""

    # The beginning of all trees (one or none), prompts that completions share, these completions, rows by themselves.
    sections: Sequence[list[int]]
    siblings: list[int]  # the completions of each of these prompts together

    @property
    def tokens(self) -> int:
        return sum(map(sum, self.sections))

    @property
    def runs(self) -> int:
        return sum(map(len, self.sections))

    @property
    def longest(self) -> int:
        return max(chain(*self.sections), default=0)


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens of each section, how many runs and trees there are at most, and how long they are."""

    prompts: int
    completions: int
    others: int
    runs: int
    trees: int
    longest_run: int
    longest_tree: int  # its completions together
    longest_prompt: int
    root: int = 0  # shapes of older checkpoints have none

    @property
    def tokens(self) -> int:
        return self.root + self.prompts + self.completions + self.others


@dataclass(frozen=True, slots=True)
class Padding:
    """What fills a shape up: lengths of runs behind each section, and as many of length 0 as are still missing."""

    sections: Sequence[list[int]]
    siblings: list[int]  # how many tokens of the padding completions look at each of the padding prompts
    empty_runs: int
    empty_trees: int


NO_PADDING = Padding(([], [], [], []), [], 0, 0)


class Shapes:
    """The shapes that micro-batches were given so far; of no more than `limit` tokens."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._known: list[Shape] = []

    def state(self) -> list[list[int]]:
        """For a checkpoint: products of other shapes round differently."""
        return [list(astuple(shape)) for shape in self._known]

    def restore(self, state: Sequence[Sequence[int]]) -> None:
        self._known = [Shape(*numbers) for numbers in state]

    def fit(self, lengths: Lengths) -> tuple[Shape, Padding] | None:
        """The smallest known shape that holds these runs, or a new one; None if it were too large."""
        most = lengths.tokens * (1 + WASTED_SHARE) + WASTED_TOKENS
        for shape in sorted(self._known, key=lambda shape: shape.tokens):
            if shape.tokens <= most and (padding := padding_in(shape, lengths)):
                return shape, padding
        made = shape_for(lengths)
        padding = padding_in(made, lengths)
        if padding is None or made.tokens > self.limit:
            return None
        self._known.append(made)
        return made, padding


def shape_for(lengths: Lengths) -> Shape:
    """
    >>> made = shape_for(Lengths(([], [100, 90], [30, 40, 50, 10], []), [70, 60]))
    >>> made.prompts, made.completions, made.others, made.runs, made.trees, made.longest_run
    (320, 160, 0, 16, 8, 256)
    """
    run = _power(2 * max(lengths.longest, 1), SHORTEST_RUN)  # the padding of the root fits in one, too
    tree, prompt = (_power(2 * max(part, default=1), SHORTEST_RUN) for part in (lengths.siblings, lengths.sections[1]))
    spare = (0, SPARE_KEYS, 0, 0)
    root, prompts, completions, others = (_size(sum(n), m) for n, m in zip(lengths.sections, spare, strict=True))
    trees = _with_room(len(lengths.siblings)) + prompts // prompt + completions // tree + 2 if prompts else 0
    runs = _with_room(lengths.runs) + trees + (completions + others) // run + 2 + bool(root)
    runs, trees = _power(runs, 16), _power(trees, 8) if trees else 0
    return Shape(prompts, completions, others, runs, trees, run, tree, prompt, root)


def padding_in(shape: Shape, lengths: Lengths) -> Padding | None:
    """What is missing of the shape; None if the runs do not fit in.

    >>> lengths = Lengths(([], [100, 90], [30, 40, 50, 10], []), [70, 60])
    >>> padding_in(shape_for(lengths), lengths)
    Padding(sections=([], [130], [30], []), siblings=[30], empty_runs=8, empty_trees=5)
    """
    whole = shape.root, shape.prompts, shape.completions, shape.others
    root, prompts, completions, others = (n - sum(own) for n, own in zip(whole, lengths.sections, strict=True))
    trees = max(-(-prompts // shape.longest_prompt), -(-completions // shape.longest_tree)) if shape.prompts else 0
    padding_runs = -(-completions // shape.longest_run), -(-others // shape.longest_run)
    empty_runs = shape.runs - lengths.runs - trees - sum(padding_runs) - bool(shape.root)
    empty_trees = shape.trees - len(lengths.siblings) - trees
    fits = (
        min(prompts - trees, completions, others, root, empty_runs, empty_trees) >= 0
        and bool(shape.root) == bool(lengths.sections[0])  # without a root, nothing attends to one
        and lengths.longest <= shape.longest_run
        and max(lengths.siblings, default=0) <= shape.longest_tree
        and max(lengths.sections[1], default=0) <= shape.longest_prompt
    )
    if not fits:
        return None
    of_runs = _divided(completions, padding_runs[0]), _divided(others, padding_runs[1])
    sections = [root] if shape.root else [], _divided(prompts, trees), *of_runs
    return Padding(sections, _divided(completions, trees), empty_runs, empty_trees)


def _size(tokens: int, more: int = 0) -> int:
    """The tokens of a section with room, and some more; 0 stays 0. Eight sizes for each doubling, at least 128, or
    multiples of 1,024.

    >>> [_size(n) for n in (0, 1, 129, 5000, 9000, 29000)]
    [0, 128, 160, 6144, 10240, 30720]
    """
    if not tokens:
        return 0
    tokens = max(SHORTEST_RUN, _with_room(tokens) + more)
    step = min(_power(tokens, 1) // 16, 1024)
    return -(-tokens // step) * step


def _with_room(n: int) -> int:
    return n + min(int(ROOM * n), MOST_ROOM)


def _power(n: int, least: int) -> int:
    """The next power of two."""
    return max(least, 1 << (n - 1).bit_length())


def _divided(n: int, parts: int) -> list[int]:
    """
    >>> _divided(7, 3), _divided(0, 2), _divided(0, 0)
    ([2, 2, 3], [0, 0], [])
    """
    return [n * (i + 1) // parts - n * i // parts for i in range(parts)]
