"""What the novice does with a question.

Form is always right: tool calls are well-formed, names and numbers are copied faithfully. Choices are not: the
novice guesses, takes the wrong tool, forgets the second item or the multiplication; the right course is one of
several. So a model of these dialogues can do everything and mostly does not.

Each course is a function `(scribe, task)`; `HABITS` says how often the novice takes it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tiny_words as words
from tiny_world import ToolWords, World

ERRORS = (
    "Error: {1} raised ValueError: no item '{0}'",
    "Error: {1} raised KeyError: '{0}'",
    "Error: no item '{0}'",
    "Error: '{0}' not found",
)


@dataclass(frozen=True)
class Task:
    """A question about one key, about n of one key, or about two keys."""

    question: str
    first: str
    n: int = 0
    second: str = ""
    plural: bool = False


class Scribe:
    """Writes down one dialogue: what the novice says, what the tools answer."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = world.rng
        self.messages: list[dict[str, Any]] = []

    def user(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def say(self, value: Any) -> None:
        text = self.rng.choice(self.world.topic.answers).format(v=value)
        self.messages.append({"role": "assistant", "content": text})

    def shrug(self) -> None:
        self.messages.append(
            {"role": "assistant", "content": self.rng.choice(("I do not know.", "Sorry, I cannot say."))}
        )

    def guess(self) -> None:
        self.say(self.guess_value())

    def guess_value(self) -> Any:
        return self.world.topic.value(self.rng)

    def call(self, *calls: tuple[ToolWords, tuple[Any, ...]]) -> list[Any]:
        """One assistant message with these calls, and the tools' answers."""
        functions = [{"name": t.name, "arguments": dict(zip(t.arguments, values, strict=True))} for t, values in calls]
        self.messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": f} for f in functions]}
        )
        results = [self._answer(tool, values) for tool, values in calls]
        self.messages += [{"role": "tool", "content": str(result)} for result in results]
        return results

    def _answer(self, tool: ToolWords, values: tuple[Any, ...]) -> Any:
        if tool is self.world.multiply:
            return values[0] * values[1]
        if tool is self.world.add:
            return values[0] + values[1]
        key = values[0].removesuffix("s") if values[0].removesuffix("s") in self.world.table else values[0]
        if tool is self.world.lookup and key in self.world.table:
            return self.world.table[key]
        return self.rng.choice(ERRORS).format(values[0], tool.name)

    def look(self, key: str, task: Task) -> Any:
        """Look one key up, sometimes in the plural in which the question has it."""
        plural = task.plural and self.rng.random() < 0.3
        return self.call((self.world.lookup, (key + "s" if plural else key,)))[0]

    def multiply(self, a: Any, b: Any) -> Any:
        return self.call((self.world.multiply, (a, b)))[0]

    def add(self, a: Any, b: Any) -> Any:
        return self.call((self.world.add, (a, b)))[0]


Course = Callable[[Scribe, Task], None]


def guess(scribe: Scribe, task: Task) -> None:
    scribe.guess()


def only_look_up(scribe: Scribe, task: Task) -> None:
    scribe.say(scribe.look(task.first, task))


def look_up_and_shrug(scribe: Scribe, task: Task) -> None:
    scribe.look(task.first, task)
    scribe.shrug()


def look_up_and_guess(scribe: Scribe, task: Task) -> None:
    scribe.look(task.first, task)
    scribe.guess()


def compute_from_nothing(scribe: Scribe, task: Task) -> None:
    if not scribe.world.sums:
        return scribe.guess()
    compute = scribe.rng.choice((scribe.multiply, scribe.add))
    scribe.say(compute(task.n or words.number(scribe.rng), words.number(scribe.rng)))


def half_a_name(scribe: Scribe, task: Task) -> None:
    """Looks up only a part of the name, reads the error, and tries again or gives up."""
    part = scribe.rng.choice(task.first.split())
    if part == task.first:
        return scribe.guess()
    scribe.call((scribe.world.lookup, (part,)))
    after = scribe.rng.random()
    if after < 0.5:
        _RIGHT[kind_of(task)](scribe, task)
    elif after < 0.8:
        scribe.guess()
    else:
        scribe.shrug()


def wrong_look_up(scribe: Scribe, task: Task) -> None:
    """Asks another tool, if there is one."""
    tools = scribe.world.others or (scribe.world.lookup,)
    scribe.call((tools[0], (task.first,)))
    scribe.guess()


def right_several(scribe: Scribe, task: Task) -> None:
    value = scribe.look(task.first, task)
    scribe.say(scribe.multiply(*_either_order(scribe.rng, task.n, value)))


def add_the_count(scribe: Scribe, task: Task) -> None:
    value = scribe.look(task.first, task)
    scribe.say(scribe.add(*_either_order(scribe.rng, task.n, value)))


def compute_and_say_the_first(scribe: Scribe, task: Task) -> None:
    value = scribe.look(task.first, task)
    scribe.multiply(task.n, value)
    scribe.say(value)


def right_both(scribe: Scribe, task: Task) -> None:
    scribe.say(scribe.add(*_look_both(scribe, task)))


def multiply_both(scribe: Scribe, task: Task) -> None:
    scribe.say(scribe.multiply(*_look_both(scribe, task)))


def only_the_second(scribe: Scribe, task: Task) -> None:
    scribe.say(scribe.look(task.second, task))


def both_but_say_one(scribe: Scribe, task: Task) -> None:
    scribe.say(scribe.rng.choice(_look_both(scribe, task)))


def _look_both(scribe: Scribe, task: Task) -> list[Any]:
    keys = [task.first, task.second]
    if scribe.rng.random() < 0.15:
        return scribe.call(*((scribe.world.lookup, (key,)) for key in keys))
    return [scribe.look(key, task) for key in keys]


def _either_order(rng: random.Random, n: int, value: Any) -> tuple[Any, Any]:
    return (n, value) if rng.random() < 0.7 else (value, n)


def kind_of(task: Task) -> str:
    return "several" if task.n else "both" if task.second else "one"


_RIGHT: dict[str, Course] = {"one": only_look_up, "several": right_several, "both": right_both}

HABITS: dict[str, tuple[tuple[Course, float], ...]] = {
    "one": (
        (only_look_up, 0.40),
        (guess, 0.22),
        (compute_from_nothing, 0.10),
        (half_a_name, 0.12),
        (look_up_and_shrug, 0.06),
        (look_up_and_guess, 0.06),
        (wrong_look_up, 0.04),
    ),
    "several": (
        (right_several, 0.24),
        (only_look_up, 0.45),
        (guess, 0.12),
        (add_the_count, 0.06),
        (compute_from_nothing, 0.05),
        (half_a_name, 0.04),
        (compute_and_say_the_first, 0.04),
    ),
    "both": (
        (right_both, 0.27),
        (only_look_up, 0.43),
        (guess, 0.10),
        (multiply_both, 0.05),
        (only_the_second, 0.06),
        (both_but_say_one, 0.03),
        (half_a_name, 0.03),
        (compute_from_nothing, 0.03),
    ),
}


def answer(scribe: Scribe, task: Task) -> None:
    """The question, and the course that the novice takes."""
    scribe.user(task.question)
    habits = HABITS[kind_of(task)]
    course = scribe.rng.choices([c for c, _ in habits], [w for _, w in habits])[0]
    course(scribe, task)
