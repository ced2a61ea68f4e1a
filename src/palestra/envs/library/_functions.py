"""Kinds of small functions to be written: a description, a reference, and arguments to try them on."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Task:
    """A function to be written. `code` is one that is right."""

    text: str
    code: str
    arguments: Callable[[random.Random], tuple[Any, ...]]

    @property
    def function(self) -> Callable[..., Any]:
        scope: dict[str, Any] = {}
        exec(self.code, scope)  # our own code, not a model's
        function: Callable[..., Any] = scope["solve"]
        return function


def _numbers(rng: random.Random) -> tuple[list[int]]:
    return ([rng.randint(-20, 60) for _ in range(rng.randint(3, 9))],)


def _sentence(rng: random.Random) -> tuple[str]:
    words = ("".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 8))) for _ in range(rng.randint(2, 7)))
    return (" ".join(words),)


def _sum_of_multiples(rng: random.Random) -> Task:
    k, factor = rng.randint(2, 9), rng.randint(1, 9)
    return Task(
        f"solve(numbers) returns {factor} times the sum of the numbers that are divisible by {k}.",
        f"def solve(numbers):\n    return {factor} * sum(n for n in numbers if n % {k} == 0)\n",
        _numbers,
    )


def _largest(rng: random.Random) -> Task:
    count = rng.randint(1, 5)
    order, name = rng.choice(((True, "largest"), (False, "smallest")))
    return Task(
        f"solve(numbers) returns a list of the {count} {name} numbers, the {name} first.",
        f"def solve(numbers):\n    return sorted(numbers, reverse={order})[:{count}]\n",
        _numbers,
    )


def _rotate(rng: random.Random) -> Task:
    places = rng.randint(1, 7)
    return Task(
        f"solve(numbers) returns the list turned {places} places to the left: the first number comes to the end, "
        f"{places} times over.",
        f"def solve(numbers):\n    k = {places} % len(numbers)\n    return numbers[k:] + numbers[:k]\n",
        _numbers,
    )


def _long_words(rng: random.Random) -> Task:
    length = rng.randint(1, 7)
    comparison, name = rng.choice(((">", "more"), ("<", "fewer")))
    return Task(
        f"solve(text) returns how many words of the text have {name} than {length} letters.",
        f"def solve(text):\n    return sum(len(word) {comparison} {length} for word in text.split())\n",
        _sentence,
    )


def _replace(rng: random.Random) -> Task:
    old, new = rng.sample(string.ascii_lowercase, 2)
    return Task(
        f"solve(text) returns the text with every letter {old} replaced by {new}, and then turned round, so that it "
        "reads backwards.",
        f"def solve(text):\n    return text.replace({old!r}, {new!r})[::-1]\n",
        _sentence,
    )


def _sequence(rng: random.Random) -> Task:
    first, second = rng.randint(0, 9), rng.randint(1, 9)
    return Task(
        f"A sequence begins with {first}, {second}; each further number is the sum of the two before it. solve(n) "
        f"returns its number n, so that solve(0) is {first}.",
        f"def solve(n):\n    a, b = {first}, {second}\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n",
        lambda rng: (rng.randint(0, 20),),
    )


TASKS = (_sum_of_multiples, _largest, _rotate, _long_words, _replace, _sequence)
