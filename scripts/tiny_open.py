"""Open worlds for palestra/tiny: tools, arguments, entities, questions and results drawn anew for each dialogue.

A world has one to four tools. A task is a question and the calls that answer it: one look-up, several look-ups and
arithmetic with their results, a look-up with the result of another, a conversion, a comparison.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tiny_names as names


@dataclass(frozen=True)
class Argument:
    """One argument: its name, its JSON type, its options if it is an enum, and how to draw a value for it."""

    name: str
    kind: str
    options: tuple[str, ...] = ()
    draw: Callable[[random.Random], Any] = names.thing

    def schema(self) -> dict[str, Any]:
        return {"type": self.kind} | ({"enum": list(self.options)} if self.options else {})


@dataclass(frozen=True)
class Tool:
    """A tool: a look-up, or arithmetic if it has a `compute`."""

    name: str
    arguments: tuple[Argument, ...]
    description: str
    attribute: str = ""
    draw_value: Callable[[random.Random], Any] = names.integer
    compute: Callable[..., Any] | None = None
    op: str = ""
    backwards: bool = False  # the question names the arguments in the opposite order

    def schema(self) -> dict[str, Any]:
        properties = {argument.name: argument.schema() for argument in self.arguments}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }


@dataclass(frozen=True)
class Ref:
    """The result of an earlier step, as an argument of a later one."""

    step: int


@dataclass(frozen=True)
class Step:
    tool: Tool
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Task:
    """A question, the calls that answer it, and the answer: the last result unless `pick` chooses from all results."""

    question: str
    steps: tuple[Step, ...]
    pick: Callable[[list[Any]], Any] | None = None
    mentions: tuple[Any, ...] = ()  # entities and numbers in the question
    attribute: str = "answer"


@dataclass
class World:
    """The tools of one dialogue, the facts behind them, and how results look."""

    rng: random.Random
    tools: list[Tool]
    facts: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    result_form: str = "{v}"
    error_form: str = "Error: {t} raised KeyError: '{x}'"
    accepts_plurals: bool = False

    def know(self, tool: Tool, key: tuple[Any, ...]) -> Any:
        return self.facts.setdefault((tool.name, *key), tool.draw_value(self.rng))

    def find(self, kind: str) -> list[Tool]:
        return [tool for tool in self.tools if (tool.op or "look") == kind]

    def tools_for(self, op: str) -> list[Tool]:
        """The tools for this operation; all arithmetic tools if none fits."""
        fitting = [tool for tool in self.tools if tool.op in (op, "calculator")]
        return fitting or [tool for tool in self.tools if tool.compute is not None]


# Tools

OP_NAMES = {
    "add": "add add plus sum".split(),
    "subtract": "subtract minus less".split(),
    "multiply": "multiply multiply times mul".split(),
    "divide": "divide over".split(),
    "convert": [],
}
OP_TEXTS = {
    "add": ("Add two numbers.", "The sum of two numbers.", "Adds {a} and {b}.", "{a} plus {b}.", "Compute a sum."),
    "subtract": ("Subtract two numbers.", "The difference of two numbers.", "{a} minus {b}.", "Takes {b} from {a}."),
    "multiply": ("Multiply two numbers.", "The product of two numbers.", "{a} times {b}.", "Multiplies {a} by {b}."),
    "divide": ("Divide two numbers.", "{a} divided by {b}.", "The quotient of two numbers.", "Split {a} by {b}."),
    "convert": ("Convert {a}.", "Converts a number.", "Turns {a} into another unit.", "Compute from {a}."),
}
OPS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / b if b else 0,
}
SIGNS = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}
A_B = (("a", "b"), ("a", "b"), ("x", "y"), ("n", "m"), ("first", "second"), ("left", "right"), ("p", "q"))


def tidy(value: Any) -> Any:
    """A number as a tool returns it: at most two decimals."""
    return round(value, 2) if isinstance(value, float) else value


def arithmetic_tool(rng: random.Random, op: str, *, decimals: bool = False) -> Tool:
    """A tool for one operation, often under a made-up name."""
    kind = "number" if decimals else rng.choice(("integer", "integer", "number"))
    if op == "convert":
        argument = names.argument_name(rng)
        factor = names.decimal(rng) if rng.random() < 0.5 else names.small(rng)
        text = _text(rng, op, argument, "")
        name = names.tool_name(rng, names.noun(rng))
        return Tool(name, (Argument(argument, kind),), text, compute=lambda a: a * factor, op=op)
    a, b = rng.choice(A_B) if rng.random() < 0.4 else names.argument_pair(rng)
    name = rng.choice(OP_NAMES[op]) if rng.random() < 0.35 else names.tool_name(rng, names.noun(rng))
    arguments = (Argument(a, kind), Argument(b, kind))
    return Tool(name, arguments, _text(rng, op, a, b), compute=OPS[op], op=op)


def calculator_tool(rng: random.Random) -> Tool:
    """A tool for all four operations that takes the operation as an argument."""
    a, b = rng.choice(A_B) if rng.random() < 0.4 else names.argument_pair(rng)
    signs = list(SIGNS.values()) if rng.random() < 0.6 else list(SIGNS)
    how = rng.choice(("op", "sign", "how", names.word(rng)))
    if len({a, b, how}) < 3:
        a, b, how = "a", "b", "op"
    options = tuple(signs) if rng.random() < 0.7 else ()
    arguments = [
        Argument(a, "number"),
        Argument(how, "string", options, lambda r: r.choice(signs)),
        Argument(b, "number"),
    ]
    if rng.random() < 0.3:
        arguments = [arguments[1], arguments[0], arguments[2]]
    place = [argument.name for argument in arguments].index(how)
    by_name = {**{sign: OPS[op] for op, sign in SIGNS.items()}, **OPS}

    def compute(*values: Any) -> Any:
        numbers = [value for i, value in enumerate(values) if i != place]
        return by_name[values[place]](*numbers)

    name = rng.choice(("compute", "math", names.tool_name(rng, names.noun(rng)), names.tool_name(rng, names.noun(rng))))
    text = rng.choice(("Do arithmetic.", "Compute with two numbers.", names.sentence(rng), ""))
    return Tool(name, tuple(arguments), text, compute=compute, op="calculator")


def _text(rng: random.Random, op: str, a: str, b: str) -> str:
    kind = rng.random()
    if kind < 0.75:
        text = rng.choice(OP_TEXTS[op]).format(a=a, b=b)
        return text[0].upper() + text[1:]
    return names.sentence(rng) if kind < 0.85 else ""


ENTITIES: tuple[tuple[Callable[[random.Random], Any], float], ...] = (
    (names.thing, 4),
    (names.proper_name, 4),
    (names.code, 1.5),
    (names.numbered, 0.8),
    (names.time_of_day, 0.2),
)
VALUES: tuple[tuple[Callable[[random.Random], Any], float], ...] = (
    (names.phrase, 4),
    (names.code, 1.2),
    (names.time_of_day, 1),
    (names.numbered, 0.6),
)


def draw_from(rng: random.Random, table: Sequence[tuple[Callable[[random.Random], Any], float]]) -> Any:
    return rng.choices([one for one, _ in table], [weight for _, weight in table])[0]


def lookup_tool(rng: random.Random, *, numeric: bool, count: int | None = None) -> Tool:
    """A look-up of one to three arguments under a random name."""
    attribute = names.noun(rng) if rng.random() < 0.85 else f"{names.noun(rng)} {names.noun(rng)}"
    count = count or rng.choices((1, 2, 3), (6, 3, 1))[0]
    arguments: list[Argument] = []
    while len(arguments) < count:
        argument = _key_argument(rng)
        if all(argument.name != other.name for other in arguments):
            arguments.append(argument)
    numbers = names.integer if numeric and rng.random() < 0.75 else names.decimal
    value = numbers if numeric else draw_from(rng, VALUES)
    return Tool(
        names.tool_name(rng, attribute),
        tuple(arguments),
        names.description(rng, attribute, arguments[0].name),
        attribute,
        value,
        backwards=count > 1 and rng.random() < 0.25,
    )


def _key_argument(rng: random.Random) -> Argument:
    name, kind = names.argument_name(rng), rng.random()
    if kind < 0.1:
        return Argument(name, "integer", draw=names.integer)
    if kind < 0.22:
        options = tuple(
            {names.phrase(rng) if rng.random() < 0.2 else names.noun(rng) for _ in range(rng.randint(2, 5))}
        )
        options = tuple(sorted(options))
        return Argument(name, "string", options, lambda r: r.choice(options))
    return Argument(name, "string", draw=draw_from(rng, ENTITIES))


def conversion_tool(rng: random.Random) -> Tool:
    """A tool that takes a number from the question, and often one or two units."""
    kind = "integer" if rng.random() < 0.6 else "number"
    number = names.decimal if kind == "number" and rng.random() < 0.5 else names.integer
    arguments = [Argument(names.argument_name(rng), kind, draw=number)]
    units = tuple(sorted({names.noun(rng) for _ in range(rng.randint(3, 5))}))
    options = units if rng.random() < 0.4 else ()
    for _ in range(rng.choices((0, 1, 2), (4, 3, 3))[0]):
        arguments.append(Argument(names.argument_name(rng), "string", options, lambda r: r.choice(units)))
    if len({argument.name for argument in arguments}) < len(arguments):
        arguments = [arguments[0]]
    if rng.random() < 0.2:
        arguments.reverse()
    value = names.decimal if rng.random() < 0.5 else names.integer
    attribute = names.noun(rng)
    return Tool(
        names.tool_name(rng, attribute),
        tuple(arguments),
        names.description(rng, attribute, arguments[0].name),
        attribute,
        value,
        op="from_number",
    )


# Questions

PREPOSITIONS = "in at on for from to with by of near under after via and".split()
ONE = (
    "What is the {t} of {x}?", "What is the {t} of {x}?", "What is the {t} for {x}?", "Tell me the {t} of {x}.",
    "Which {t} does {x} have?", "Which {t} has {x}?", "Give me the {t} of {x}.", "{x}: which {t}?", "What {t} is {x}?",
    "How much {t} has {x}?", "How many {t} does {x} have?", "How {t} is {x}?", "Where is {x}?", "Who has {x}?",
    "When does {x} leave?", "What about {x}?", "I need the {t} of {x}.", "Please find the {t} of {x}.", "Look up {x}.",
    "Can you tell me the {t} of {x}?", "Do you know the {t} of {x}?", "{x} {t}?", "In which {t} is {x}?",
    "What does {x} mean?", "What does {x} cost?", "How much is {x}?", "How long does {x} take?", "What is {x}?",
    "How many {x} are there?", "How many {x} do we have?", "On which {t} is {x}?", "How much {t} is there for {x}?",
    "Show me the {t} for {x}.", "Who is the {t} of {x}?", "Where can I find {x}?", "What is {x}'s {t}?",
    "How far is {x}?", "At what {t} does {x} start?", "What is the current {t} of {x}?", "How long is {x}?",
    "How much {x} is left?", "Which {t} is for {x}?", "What {t} do I need for {x}?", "When is {x}?", "How old is {x}?",
)  # fmt: skip
SEVERAL = (
    "What is {n} times the {t} of {x}?", "What do {n} {x} cost?", "What is the {t} of {n} {x}?", "{n} {x}: what {t}?",
    "How much {t} for {n} {x}?", "How many {t} do {n} {x} need?", "I want {n} {x}. What is the {t}?",
    "What is the total {t} of {n} {x}?", "How much is {n} {x}?", "How much {t} do {n} {x} have in total?",
    "How much {t} is needed for {x} for {n} people?", "What {t} do I get for {n} at {x}?", "How much {x} for {n}?",
    "Take the {t} of {x} {n} times.", "How long do {n} {x} take?", "What do I pay for {n} {x}?",
    "How much {x} do I need for {n} {u}?", "How much is {n} {u} in {x}?", "What are {n} {u} of {x}?",
    "Each {x} has its {t}. How much is that for {n}?", "With {n} {u}, what is the {t} of {x}?",
)  # fmt: skip
TOGETHER = (
    "What is the {t} of {x} and {y} together?", "What is the total {t} of {x} and {y}?", "What do {x} and {y} cost?",
    "How much {t} do {x} and {y} have in total?", "Add the {t} of {x} and {y}.", "How many {x} and {y} are there?",
    "What is the sum of the {t} of {x} and of {y}?", "How much is {x} plus {y}?", "How long do {x} and {y} take?",
    "What {t} do {x} and {y} have together?", "{x} and {y}: total {t}?", "I take {x} and {y}. How much is it?",
    "How far is it to {x} and then to {y}?", "How many {t} are in {x} and {y} together?",
)  # fmt: skip
DIFFERENCE = (
    "What is the difference in {t} between {x} and {y}?", "How much more {t} has {x} than {y}?",
    "By how much is the {t} of {x} above that of {y}?", "How much is {x} over {y}?", "What is {x} minus {y}?",
    "How many more {t} are in {x} than in {y}?", "How much {u} is {x} than {y}?",
    "How much longer is {x} than {y}?", "What is the gap between {x} and {y}?",
)  # fmt: skip
COMPARE = (
    "Which has more {t}, {x} or {y}?", "Which is {u}, {x} or {y}?", "Who has the higher {t}, {x} or {y}?",
    "Has {x} or {y} more {t}?", "Where is the {t} higher: {x} or {y}?", "Compare the {t} of {x} and {y}.",
)  # fmt: skip
CHAIN = (
    "What is the {t} of the {s} of {x}?", "Find the {s} of {x}, then its {t}.", "Which {t} does the {s} of {x} have?",
    "What {t} belongs to the {s} of {x}?", "Who is the {t} for {x}?", "What is the {t} where {x} is?",
    "In which {t} is the {s} of {x}?", "What is {x}'s {s}'s {t}?", "What is the {t} for {x}?",
    "Where is the {s} of {x}?",
)  # fmt: skip
TWO_TOOLS = (
    "What are the {t} and the {s} of {x} together?", "What is the {t} minus the {s} of {x}?",
    "How much {t} is left after the {s} for {x}?", "What is the {t} of {x} with its {s}?",
    "How much do the {t} and the {s} for {x} come to?", "{x} has a {t} and a {s}. What is left?",
    "I want the {t} and the {s} of {x}. How much is it in all?", "How many more {t} may {x} have?",
    "How much is {x} with {s}?", "What is the difference between {t} and {s} of {x}?", "How many {x} are left?",
    "What is the {t} of {x} times its {s}?", "How much {t} has {x} without {s}?",
)  # fmt: skip
ROUTE = (
    "How long is it from {a} to {b} and then to {c}?", "What is the {t} from {a} to {b} and on to {c}?",
    "How much {t} from {a} via {b} to {c}?", "I go from {a} to {b}, then to {c}. What is the {t}?",
    "What is the total {t} from {a} over {b} to {c}?", "{a} to {b}, {b} to {c}: how much {t}?",
)  # fmt: skip
THREE = (
    "What is the {t} of {x}, {y} and {z} together?", "What do {x}, {y} and {z} cost?",
    "Add up the {t} of {x}, {y} and {z}.",
    "How much {t} do {x}, {y} and {z} have in total?", "What is the total {t} of {x}, {y} and {z}?",
    "How many {t} are in {x}, {y} and {z}?",
)  # fmt: skip
CONVERT = (
    "How much is {n} {u} in {w}?", "Convert {n} {u} to {w}.", "What is {n} {u} in {w}?", "How many {w} are {n} {u}?",
    "Turn {n} {u} into {w}.", "{n} {u} in {w}?", "What are {n} {u} as {w}?", "I have {n} {u}. How many {w} is that?",
    "How many {w} are in {n} {u}?", "Please give me {n} {u} in {w}.", "What does {n} {u} make in {w}?",
)  # fmt: skip


def key_text(world: World, tool: Tool, key: tuple[Any, ...]) -> str:
    """The key as the question says it: the entities joined by prepositions, sometimes with articles."""
    values = list(reversed(key)) if tool.backwards else list(key)
    parts = []
    for i, value in enumerate(values):
        # One world uses the same prepositions and articles in all its questions, as an agent's test cases do.
        style = random.Random(f"{tool.name} {tool.description} {i}")
        text = str(value)
        name = tool.arguments[-1 - i if tool.backwards else i].name.replace("_", " ")
        if len(name) > 2 and style.random() < 0.18:
            text = f"{name} {text}"
        elif style.random() < 0.12:
            text = f"{names.noun(style)} of {text}"
        elif text[0].islower() and style.random() < 0.4:
            text = f"{style.choice(('the', 'the', 'a'))} {text}"
        elif text[0].islower() and style.random() < 0.15:
            text += "s"
        if i:
            text = f"{style.choice(PREPOSITIONS)} {text}"
        parts.append(text)
    return " ".join(parts)


def phrase_question(world: World, forms: tuple[str, ...], **slots: Any) -> str:
    """A question of one of these forms, of random words around the same slots, or with a clause before or after it."""
    rng = world.rng
    form = rng.choice(forms)
    kind = rng.random()
    if kind < 0.15:
        form = _random_form(rng, form)
    elif kind < 0.45:
        form = _with_unknown_words(rng, form)
    text = form.format(**slots)
    text = text[0].upper() + text[1:] if rng.random() < 0.9 else text
    extra = rng.random()
    if extra < 0.1:
        text = f"{names.lead_in(rng)} {text[0].lower() + text[1:] if rng.random() < 0.5 else text}"
    elif extra < 0.14:
        text = f"{rng.choice(names.CLAUSES)} {text}"
    elif extra < 0.18:
        text = f"{text} {rng.choice(names.CLAUSES)}"
    return text


def _random_form(rng: random.Random, form: str) -> str:
    slots = [part.partition("}")[0] for part in form.split("{")[1:]]
    pieces: list[str] = []
    for slot in slots:
        count = rng.randint(0, 3)
        pieces += [names.word(rng) if rng.random() < 0.3 else rng.choice(names.FILLERS) for _ in range(count)]
        pieces.append("{" + slot + "}")
    pieces += [rng.choice(names.FILLERS) for _ in range(rng.randint(0, 2))]
    return " ".join(pieces) + rng.choice(("?", "?", "."))


def _with_unknown_words(rng: random.Random, form: str) -> str:
    """The form with one or two of its words replaced, or one added, by words that mean nothing to the model."""
    pieces = form.split(" ")
    for _ in range(rng.choice((1, 1, 2))):
        i = rng.randrange(1, len(pieces)) if len(pieces) > 1 else 0
        if "{" in pieces[i] or rng.random() < 0.3:
            pieces.insert(i, names.noun(rng))
        else:
            end = pieces[i][-1] if pieces[i][-1] in "?.,:" else ""
            pieces[i] = names.noun(rng) + end
    return " ".join(pieces)


# Tasks


def _fresh_key(world: World, tool: Tool) -> tuple[Any, ...]:
    key = tuple(argument.draw(world.rng) for argument in tool.arguments)
    world.know(tool, key)
    return key


def one_task(world: World) -> Task:
    tool = world.rng.choice(world.find("look"))
    key = _fresh_key(world, tool)
    question = phrase_question(world, ONE, t=tool.attribute, x=key_text(world, tool, key))
    return Task(question, (Step(tool, key),), mentions=key, attribute=tool.attribute)


def convert_task(world: World) -> Task:
    rng = world.rng
    tool = world.rng.choice(world.find("from_number"))
    key = _fresh_key(world, tool)
    number = next(value for value in key if not isinstance(value, str))
    units = [value for value in key if isinstance(value, str)]
    if tool.backwards:
        units.reverse()
    u = units[0] if units else tool.arguments[0].name.replace("_", " ")
    w = units[1] if len(units) > 1 else tool.attribute
    if len(units) == 1 and rng.random() < 0.5:
        u, w = w, u
    question = phrase_question(world, CONVERT, n=number, u=u, w=w)
    return Task(question, (Step(tool, key),), mentions=key, attribute=w)


def several_task(world: World) -> Task:
    """One look-up and a number from the question, multiplied, added or converted."""
    tool = world.rng.choice(world.find("look"))
    key, n = _fresh_key(world, tool), names.small(world.rng)
    slots = {"t": tool.attribute, "x": key_text(world, tool, key), "n": n, "u": names.noun(world.rng)}
    question = phrase_question(world, SEVERAL, **slots)
    first, second = (n, Ref(0)) if world.rng.random() < 0.5 else (Ref(0), n)
    last = arithmetic_step(world, "multiply", first, second)
    return Task(question, (Step(tool, key), last), mentions=(*key, n), attribute=tool.attribute)


def pair_task(world: World) -> Task:
    """The same look-up for two keys, added, subtracted or compared."""
    rng = world.rng
    tool = rng.choice(world.find("look"))
    x, y = _fresh_key(world, tool), _fresh_key(world, tool)
    if len(x) > 1 and rng.random() < 0.4:  # the same place for both, as in 'of A and of B in C'
        y = (y[0], *x[1:])
        world.know(tool, y)
    slots = {"t": tool.attribute, "x": key_text(world, tool, x), "y": key_text(world, tool, y), "u": names.noun(rng)}
    looks = (Step(tool, x), Step(tool, y))
    mentions = (*x, *y)
    relation = rng.random()
    if relation < 0.15 or not world.tools_for("add"):
        a, b = (world.know(tool, key) for key in (x, y))
        winner = (x if a >= b else y)[0]
        return Task(
            phrase_question(world, COMPARE, **slots), looks, lambda results: winner, mentions, attribute=tool.attribute
        )
    op, forms = ("add", TOGETHER) if relation < 0.65 else ("subtract", DIFFERENCE)
    last = arithmetic_step(world, op, Ref(0), Ref(1))
    return Task(phrase_question(world, forms, **slots), (*looks, last), mentions=mentions, attribute=tool.attribute)


def route_task(world: World) -> Task:
    """The same look-up of two arguments for two legs of a way, added."""
    (tool,) = world.find("look")
    a, b = _fresh_key(world, tool)
    c = tool.arguments[1].draw(world.rng)
    world.know(tool, (b, c))
    question = phrase_question(world, ROUTE, a=a, b=b, c=c, t=tool.attribute)
    last = arithmetic_step(world, "add", Ref(0), Ref(1))
    steps = (Step(tool, (a, b)), Step(tool, (b, c)), last)
    return Task(question, steps, mentions=(a, b, c), attribute=tool.attribute)


def three_task(world: World) -> Task:
    """The same look-up for three keys, added."""
    (tool,) = world.find("look")
    keys = [_fresh_key(world, tool) for _ in range(3)]
    x, y, z = (key_text(world, tool, key) for key in keys)
    question = phrase_question(world, THREE, x=x, y=y, z=z, t=tool.attribute)
    first, second, third = (Step(tool, key) for key in keys)
    if world.rng.random() < 0.6:
        sums = arithmetic_step(world, "add", Ref(0), Ref(1)), arithmetic_step(world, "add", Ref(3), Ref(2))
        steps = (first, second, third, *sums)
    else:
        sums = arithmetic_step(world, "add", Ref(0), Ref(1)), arithmetic_step(world, "add", Ref(2), Ref(3))
        steps = (first, second, sums[0], third, sums[1])
    return Task(question, steps, mentions=tuple(v for key in keys for v in key), attribute=tool.attribute)


def chain_task(world: World) -> Task:
    """A look-up with the result of another look-up."""
    (first,), (second,) = world.find("look"), world.find("second_look")
    key = _fresh_key(world, first)
    world.know(second, (world.know(first, key),))
    slots = {"t": second.attribute, "s": first.attribute, "x": key_text(world, first, key)}
    steps = (Step(first, key), Step(second, (Ref(0),)))
    return Task(phrase_question(world, CHAIN, **slots), steps, mentions=key, attribute=second.attribute)


def two_tools_task(world: World) -> Task:
    """Two look-ups of one key, and arithmetic with both results."""
    first, second = world.find("look")[:2]
    key = _fresh_key(world, first)
    world.know(second, key)
    slots = {"t": first.attribute, "s": second.attribute, "x": key_text(world, first, key)}
    op = world.rng.choice(("add", "subtract", "subtract", "multiply"))
    steps, refs = [Step(first, key), Step(second, key)], [Ref(0), Ref(1)]
    if world.rng.random() < 0.2:
        steps.reverse()
        refs.reverse()
    last = arithmetic_step(world, op, *refs)
    return Task(phrase_question(world, TWO_TOOLS, **slots), (*steps, last), mentions=key, attribute=first.attribute)


def arithmetic_step(world: World, op: str, a: Any, b: Any) -> Step:
    """A call for this operation with a tool that the world has; with any arithmetic tool if none fits."""
    tools = world.tools_for(op)
    tool = world.rng.choice(tools)
    if tool.op == "convert":
        return Step(tool, (a if isinstance(a, Ref) else b,))
    if tool.op == "calculator":
        numbers = iter((a, b))
        values = []
        for argument in tool.arguments:
            if argument.kind == "string":
                sample = argument.draw(random.Random(0))
                values.append(op if sample in SIGNS else SIGNS[op])
            else:
                values.append(next(numbers))
        return Step(tool, tuple(values))
    return Step(tool, (a, b))


# Worlds

RESULT_FORMS = (
    ("{v}", 12.0),
    ('{{"{t}": {j}}}', 1.5),
    ('{{"{k}": "{x}", "{t}": {j}}}', 0.8),
    ("{v} {u}", 0.8),
    ("{t}: {v}", 0.6),
    ("The {t} is {v}.", 0.5),
)
ERROR_FORMS = (
    "Error: {t} raised KeyError: {keys}",
    "Error: {t} raised KeyError: {keys}",
    "Error: {t} raised KeyError: '{x}'",
    "Error: {t} raised ValueError: no {a} '{x}'",
    "Error: {t} raised ValueError: unknown {a} {x}",
    "Error: no {a} '{x}'",
    "Error: '{x}' not found",
    "unknown {a}: {x}",
    "not found",
    "null",
)
TASKS: tuple[tuple[Callable[[World], Task], float], ...] = (
    (one_task, 2.6),
    (convert_task, 1.5),
    (several_task, 2.0),
    (pair_task, 2.4),
    (chain_task, 1.2),
    (two_tools_task, 1.4),
    (route_task, 0.7),
    (three_task, 0.4),
)


def make_world(rng: random.Random) -> tuple[World, Callable[[World], Task]]:
    """A world with the tools that one kind of task needs and up to two others, and that kind of task."""
    make_task = draw_from(rng, TASKS)
    tools: list[Tool] = []
    if make_task is convert_task:
        tools.append(conversion_tool(rng))
    elif make_task is chain_task:
        tools = [lookup_tool(rng, numeric=False), lookup_tool(rng, numeric=rng.random() < 0.5, count=1)]
        argument = tools[1].arguments[0]
        tools[1] = replace(tools[1], arguments=(Argument(argument.name, "string"),), op="second_look")
    elif make_task is two_tools_task:
        first = lookup_tool(rng, numeric=True)
        second = lookup_tool(rng, numeric=True)
        if rng.random() < 0.4:
            second = replace(second, name=_like(rng, first.name))
        arguments = first.arguments if rng.random() < 0.7 else _renamed(rng, first.arguments)
        tools = [first, replace(second, arguments=arguments, backwards=first.backwards)]
    elif make_task is route_task:
        tools = [lookup_tool(rng, numeric=True, count=2)]
        place = draw_from(rng, ENTITIES)
        arguments = tuple(Argument(argument.name, "string", draw=place) for argument in tools[0].arguments)
        tools = [replace(tools[0], arguments=arguments)]
    else:
        count = 1 if make_task is three_task else None
        tools.append(lookup_tool(rng, numeric=make_task is not one_task or rng.random() < 0.5, count=count))
    if make_task not in (one_task, convert_task, chain_task):
        decimals = any(tool.draw_value is names.decimal for tool in tools)
        tools += _arithmetic_tools(rng, converts=make_task is several_task, decimals=decimals)
    while len(tools) < 4 and rng.random() < 0.22:
        tools.append(_distractor(rng))
    if len({tool.name for tool in tools}) < len(tools):
        return make_world(rng)
    if rng.random() < 0.4:
        rng.shuffle(tools)
    form = rng.choices([f for f, _ in RESULT_FORMS], [w for _, w in RESULT_FORMS])[0]
    return World(rng, tools, {}, form, rng.choice(ERROR_FORMS), rng.random() < 0.4), make_task


def _arithmetic_tools(rng: random.Random, *, converts: bool, decimals: bool) -> list[Tool]:
    kind = rng.random()
    if kind < 0.25:
        return [calculator_tool(rng)]
    ops = ["add", "subtract", "multiply", "divide"] + (["convert"] if converts else [])
    count = 1 if kind < 0.65 else 2
    return [arithmetic_tool(rng, op, decimals=decimals) for op in rng.sample(ops, count)]


def _distractor(rng: random.Random) -> Tool:
    kind = rng.random()
    if kind < 0.5:
        return replace(lookup_tool(rng, numeric=rng.random() < 0.5), op="other")
    if kind < 0.8:
        return arithmetic_tool(rng, rng.choice(("add", "subtract", "multiply", "divide")))
    return replace(conversion_tool(rng), op="other")


def _like(rng: random.Random, name: str) -> str:
    """Another name that shares a part with this one."""
    parts = name.split("_")
    if len(parts) == 1:
        return f"{names.word(rng)}_{name}" if rng.random() < 0.5 else f"{name}_{names.word(rng)}"
    parts[rng.randrange(len(parts))] = names.word(rng)
    return "_".join(parts)


def _renamed(rng: random.Random, arguments: tuple[Argument, ...]) -> tuple[Argument, ...]:
    renamed = tuple(Argument(names.argument_name(rng), a.kind, a.options, a.draw) for a in arguments)
    return renamed if len({a.name for a in renamed}) == len(renamed) else arguments
