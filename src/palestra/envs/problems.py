"""The problems of an environment as sequences: drawn on demand, handed out one by one, or listed."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

from palestra.core.calls import user_code
from palestra.core.errors import InputError, UserCodeError, text_of
from palestra.core.messages import as_messages
from palestra.core.time_limit import time_limit
from palestra.core.types import Problem
from palestra.envs.base import Split

_MAX_DRAWS = 500  # for one problem, before a split counts as empty
MAKE_LIMIT_S = 300.0  # for one problem


def as_problem(item: Any, problem_id: str) -> Problem:
    """A question, a pair, a dict with `input` and `expect`, or a Problem, as a Problem with an id.

    >>> as_problem(("What is 1 + 1?", 2), "p0")
    Problem(id='p0', input='What is 1 + 1?', expect=2, row={})
    """
    match item:
        case Problem():
            return item if item.id else replace(item, id=problem_id)
        case str():
            return Problem(problem_id, item)
        case (str() as text, expect):
            return Problem(problem_id, text, expect)
        case Mapping() if "input" in item:
            prompt = item["input"] if isinstance(item["input"], str) else as_messages(item["input"])
            return Problem(str(item.get("id", problem_id)), prompt, item.get("expect"), dict(item))
        case _:
            raise InputError(
                f"a problem is {item!r}; expected a question, a pair (question, expected), a dict with "
                "`input` and `expect`, or a Problem"
            )


def is_held_out(problem: Problem, share: float) -> bool:
    """Whether a problem belongs to the held-out share; it depends on the problem alone, so splits never overlap."""
    key = repr((problem.input, problem.expect)).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "big") < share * 2**48


class NoProblem(UserCodeError):
    """A split has no problem to give."""


@dataclass(frozen=True)
class LazyProblems:
    """`size` problems of a split, each from its own random generator."""

    make: Callable[[random.Random], Any]
    split: Split
    size: int
    share: float
    seed: int

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[Problem]:
        return (self[i] for i in range(self.size))

    def __getitem__(self, index: int) -> Problem:
        rng = random.Random(f"{self.seed}/{self.split}/{index}")
        for _ in range(_MAX_DRAWS):
            problem = as_problem(self.make(rng), f"{self.split}-{index}")
            if is_held_out(problem, self.share) == (self.split == "held_out"):
                return problem
        raise NoProblem(
            f"make_problem gave no problem for the {self.split} split in {_MAX_DRAWS} draws: it makes too few "
            "different ones. Make more, or set held_out_share"
        )


@dataclass
class Stream:
    """Problems handed out one after the other until None, dealt out to the splits."""

    next_item: Callable[[], Any]
    share: float
    dealt: dict[Split, list[Problem]] = field(default_factory=lambda: {"train": [], "held_out": []})
    ended: bool = False

    def take(self, split: Split, size: int) -> list[Problem]:
        """Up to `size` problems of a split; problems of the other split are kept for it."""
        most = len(self.dealt[split]) + _MAX_DRAWS * size
        while len(self.dealt[split]) < size and sum(map(len, self.dealt.values())) < most and not self.ended:
            item = self.next_item()
            if item is None:
                self.ended = True
            else:
                problem = as_problem(item, f"item-{sum(map(len, self.dealt.values()))}")
                self.dealt["held_out" if is_held_out(problem, self.share) else "train"].append(problem)
        return self.dealt[split][:size]


@dataclass
class ProblemList(Sequence[Problem]):
    """Problems by index, made when they are asked for. One that cannot be made has the reason as its error."""

    items: Any
    split: Split
    _made: dict[int, Problem] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        if at not in self._made:
            problem_id = f"{self.split}-{at}"
            try:
                with time_limit(MAKE_LIMIT_S), user_code():
                    self._made[at] = as_problem(self.items[at], problem_id)
            except Exception as error:
                reason = text_of(error, f"making problem {problem_id}")
                self._made[at] = Problem(problem_id, "(this problem could not be made)", error=reason)
        return self._made[at]


def problem_list(items: Any, split: Split, limit: int) -> ProblemList:
    """The problems of an environment as a list: indexable things stay lazy, iterators are cut at `limit`."""
    if not hasattr(items, "__getitem__") or not hasattr(items, "__len__"):
        items = list(itertools.islice(items, limit))
    if isinstance(items, LazyProblems):
        try:
            with time_limit(MAKE_LIMIT_S), user_code():
                items[0]
        except NoProblem:
            if split == "train":
                raise
            items = []  # too few different problems to hold any out: the training ones are scored instead
        except Exception:  # fails its own attempts
            pass
    return ProblemList(items, split)
