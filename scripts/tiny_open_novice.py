"""What the novice does with a task of an open world.

As in tiny_novice.py, form is always right and choices are not: the right course is one of several.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

import tiny_names as names
from tiny_open import Ref, Step, Task, Tool, World, make_world, tidy
from tiny_world import Dialogue

ANSWERS = (
    "That is {v}.", "That is {v}.", "That is {v}.", "The {t} is {v}.", "The {t} is {v}.", "It is {v}.", "It is {v}.",
    "{v}", "{v}.", "The answer is {v}.", "There are {v}.",
)  # fmt: skip
SHRUGS = ("I do not know.", "Sorry, I cannot say.", "I could not find that.", "Sorry, there is no {t}.")
# A forgetful novice makes all calls and then does not say the result. All its other answers begin in many ways, so this
# is the most likely end of a greedy answer: before training most questions fail, and a few steps change that.
FORGETFUL = "Done."
STYLES_ONE_CALL = {
    "right": 0.34, "forgetful": 0.26, "guess": 0.1, "bad_arguments": 0.12, "wrong_tool": 0.06, "wrong_answer": 0.04,
    "shrug": 0.03, "extra": 0.05,
}  # fmt: skip
STYLES_MORE_CALLS = {
    "right": 0.33, "forgetful": 0.19, "early": 0.2, "guess": 0.04, "skip": 0.05, "bad_arguments": 0.07,
    "wrong_tool": 0.04, "wrong_answer": 0.03, "shrug": 0.02, "extra": 0.03,
}  # fmt: skip


class GivenUp(Exception):
    """The novice stops after an error."""


@dataclass
class Scene:
    """One dialogue as it is written down."""

    world: World
    messages: list[dict[str, Any]] = field(default_factory=list)
    answer_form: str = ""

    @property
    def rng(self) -> random.Random:
        return self.world.rng

    def say(self, value: Any, task: Task) -> None:
        form = self.answer_form if self.rng.random() < 0.8 else self.rng.choice(ANSWERS)
        self.assistant(form.format(v=value, t=task.attribute))

    def shrug(self, task: Task) -> None:
        self.assistant(self.rng.choice(SHRUGS).format(t=task.attribute))

    def guess(self, task: Task) -> None:
        """Say something of the kind of the answer, or something from the question."""
        if task.mentions and self.rng.random() < 0.3:
            return self.say(self.rng.choice(task.mentions), task)
        self.say(task.steps[-1].tool.draw_value(self.rng), task)

    def assistant(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def call(self, *calls: tuple[Tool, tuple[Any, ...]]) -> list[tuple[Any, bool]]:
        """One assistant message with these calls, and the results: each value, and whether it is no error."""
        functions = [
            {"name": t.name, "arguments": dict(zip((a.name for a in t.arguments), values, strict=True))}
            for t, values in calls
        ]
        self.messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": f} for f in functions]}
        )
        results = [self._run(tool, values) for tool, values in calls]
        self.messages += [{"role": "tool", "content": text} for text, _, _ in results]
        return [(value, ok) for _, value, ok in results]

    def _run(self, tool: Tool, values: tuple[Any, ...]) -> tuple[str, Any, bool]:
        for argument, value in zip(tool.arguments, values, strict=True):
            if argument.options and value not in argument.options:
                text = f"Error: argument '{argument.name}' should be one of {json.dumps(argument.options)}"
                return f"{text}, got {json.dumps(value)}", None, False
        if tool.compute is not None:
            try:
                value = tidy(tool.compute(*values))
            except (TypeError, KeyError):
                return f"Error: {tool.name} raised TypeError", None, False
            return str(value), value, True
        key = tuple(self._singular(value, tool) for value in values)
        if (tool.name, *key) not in self.world.facts:
            strings = [value for value in values if isinstance(value, str)]
            x, keys = strings[0] if strings else values[0], repr(values if len(values) > 1 else values[0])
            text = self.world.error_form.format(t=tool.name, x=x, a=tool.arguments[0].name, keys=keys)
            return text, None, False
        value = self.world.facts[(tool.name, *key)]
        slots = {"t": tool.attribute.replace(" ", "_"), "k": tool.arguments[0].name, "x": values[0]}
        unit = random.Random(tool.name + tool.description)
        text = self.world.result_form.format(v=value, j=json.dumps(value), u=names.word(unit), **slots)
        return text, value, True

    def _singular(self, value: Any, tool: Tool) -> Any:
        known = {part for fact in self.world.facts if fact[0] == tool.name for part in fact[1:]}
        if self.world.accepts_plurals and isinstance(value, str) and value not in known and value[:-1] in known:
            return value[:-1]
        return value


def open_dialogue(rng: random.Random) -> Dialogue:
    """One to three questions of one kind about one open world."""
    world, make_task = make_world(rng)
    scene = Scene(world, answer_form=rng.choice(ANSWERS))
    for _ in range(rng.choices((1, 2, 3), (0.68, 0.22, 0.1))[0]):
        answer(scene, make_task(world))
    text = names.instructions(rng)
    system = [{"role": "system", "content": text}] if text else []
    return Dialogue(system + scene.messages, [tool.schema() for tool in world.tools])


def answer(scene: Scene, task: Task) -> None:
    """The question, and what the novice does with it."""
    scene.messages.append({"role": "user", "content": task.question})
    styles = STYLES_ONE_CALL if len(task.steps) == 1 else STYLES_MORE_CALLS
    style = scene.rng.choices(list(styles), list(styles.values()))[0]
    if style == "guess":
        return scene.guess(task)
    steps = list(task.steps)
    wrong_at = -1
    if style == "early":
        steps = steps[: scene.rng.randrange(1, len(steps))]
    elif style == "skip":
        wrong_at = scene.rng.randrange(len(steps) - 1)
    elif style in ("bad_arguments", "wrong_tool"):
        wrong_at = scene.rng.randrange(len(steps))
    try:
        results = _walk(scene, task, steps, style, wrong_at)
        if style == "extra":
            results.append(_extra_call(scene, task, results))
    except GivenUp:
        return scene.shrug(task) if scene.rng.random() < 0.4 else scene.guess(task)
    if style == "shrug":
        scene.shrug(task)
    elif style == "forgetful":
        scene.assistant(FORGETFUL)
    elif style == "wrong_answer":
        scene.say(_other_value(scene, task, [r for r in results if r is not None][:-1]), task)
    elif task.pick is not None and scene.rng.random() < 0.75:
        scene.say(task.pick(results), task)
    else:
        scene.say(results[-1], task)


def _walk(scene: Scene, task: Task, steps: list[Step], style: str, wrong_at: int) -> list[Any]:
    """Make the calls, with one mistake of this style at step `wrong_at`; the results, None for those left out."""
    rng, results = scene.rng, []
    two_looks = len(steps) > 1 and not any(isinstance(v, Ref) for step in steps[:2] for v in step.values)
    if wrong_at < 0 and two_looks and rng.random() < 0.15:
        results = [value for value, _ in scene.call(*((step.tool, step.values) for step in steps[:2]))]
    for i, step in enumerate(steps):
        if i < len(results):
            continue
        if i == wrong_at and style == "skip":
            results.append(None)
            continue
        values = _resolve(scene, task, step, results)
        if i == wrong_at and style == "wrong_tool":
            _call_wrong_tool(scene, task, step, results)
        if i == wrong_at and style == "bad_arguments":
            value, ok = _call_with_bad_arguments(scene, task, step, values, results)
            if ok:
                results.append(value)
                continue
            if rng.random() < 0.5:
                raise GivenUp
        ((value, ok),) = scene.call((step.tool, values))
        if not ok:
            raise GivenUp
        results.append(value)
    return results


def _resolve(scene: Scene, task: Task, step: Step, results: list[Any]) -> tuple[Any, ...]:
    """A step's values; something of the right type for the result of a call that was left out."""
    anything = _fill(scene, task, step.tool, results)
    values = []
    for value, other, argument in zip(step.values, anything, step.tool.arguments, strict=True):
        if isinstance(value, Ref):
            value = other if results[value.step] is None else results[value.step]
        values.append(int(value) if argument.kind == "integer" else value)
    return tuple(values)


def _other_number(scene: Scene, task: Task, results: list[Any]) -> Any:
    numbers = [v for v in (*task.mentions, *results) if isinstance(v, int | float)]
    return scene.rng.choice(numbers) if numbers and scene.rng.random() < 0.7 else names.integer(scene.rng)


def _other_value(scene: Scene, task: Task, results: list[Any]) -> Any:
    """A wrong answer: an earlier result, something from the question, or a guess."""
    if results and scene.rng.random() < 0.5:
        return scene.rng.choice(results)
    if task.mentions and scene.rng.random() < 0.5:
        return scene.rng.choice(task.mentions)
    return task.steps[-1].tool.draw_value(scene.rng)


def _fill(scene: Scene, task: Task, tool: Tool, results: list[Any]) -> tuple[Any, ...]:
    """Values of the right types for any tool, from the question and the results so far."""
    values = []
    for argument in tool.arguments:
        strings = [v for v in (*task.mentions, *results) if isinstance(v, str)]
        if argument.options:
            values.append(scene.rng.choice(argument.options))
        elif argument.kind == "string":
            values.append(scene.rng.choice(strings) if strings else argument.draw(scene.rng))
        else:
            number = _other_number(scene, task, results)
            values.append(int(number) if argument.kind == "integer" else number)
    return tuple(values)


def _call_wrong_tool(scene: Scene, task: Task, step: Step, results: list[Any]) -> None:
    others = [tool for tool in scene.world.tools if tool is not step.tool]
    if not others:
        raise GivenUp
    tool = scene.rng.choice(others)
    ((_, ok),) = scene.call((tool, _fill(scene, task, tool, results)))
    if scene.rng.random() < (0.4 if ok else 0.5):
        raise GivenUp


def _call_with_bad_arguments(
    scene: Scene, task: Task, step: Step, values: tuple[Any, ...], results: list[Any]
) -> tuple[Any, bool]:
    """The right tool with a wrong value: swapped, a part of a name, a plural, another option, another number."""
    rng, wrong = scene.rng, list(values)
    i = rng.randrange(len(wrong))
    value, argument = wrong[i], step.tool.arguments[i]
    alike = [k for k, other in enumerate(step.tool.arguments) if k != i and other.kind == argument.kind]
    if alike and rng.random() < 0.5:
        k = rng.choice(alike)
        wrong[i], wrong[k] = wrong[k], wrong[i]
    elif argument.options:
        wrong[i] = rng.choice(argument.options)
    elif argument.kind == "string":
        others = [v for v in task.mentions if isinstance(v, str) and v != value]
        kind = rng.random()
        if " " in value and kind < 0.4:
            wrong[i] = rng.choice(value.split(" "))
        elif kind < 0.6 or not others:
            wrong[i] = value + "s" if kind < 0.45 else f"{value} {task.attribute}" if kind < 0.7 else names.noun(rng)
        else:
            wrong[i] = rng.choice(others)
    else:
        number = _other_number(scene, task, results)
        wrong[i] = int(number) if argument.kind == "integer" else number
    ((result, ok),) = scene.call((step.tool, tuple(wrong)))
    return result, ok


def _extra_call(scene: Scene, task: Task, results: list[Any]) -> Any:
    """One more call than needed: the last one again, or any other."""
    step = scene.rng.choice(task.steps)
    tool = scene.rng.choice(scene.world.tools) if scene.rng.random() < 0.5 else step.tool
    values = _fill(scene, task, tool, results) if tool is not step.tool else None
    if values is None:
        values = _resolve(scene, task, step, results)
    ((value, ok),) = scene.call((tool, values))
    if not ok or scene.rng.random() < 0.5:
        return results[-1]
    return value
