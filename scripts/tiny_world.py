"""What a dialogue is about: topics to ask about, and tools that answer, named differently each time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tiny_words as words


@dataclass(frozen=True)
class Dialogue:
    """Chat messages and the schemas of the tools that they may use."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]


@dataclass(frozen=True)
class ToolWords:
    """One tool as this dialogue names it."""

    name: str
    arguments: tuple[str, ...]
    kind: str
    description: str

    def schema(self) -> dict[str, Any]:
        properties = {argument: {"type": self.kind} for argument in self.arguments}
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": {"type": "object", "properties": properties, "required": list(self.arguments)},
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Topic:
    """What is asked about: question forms of the three kinds, answer forms, and where keys and values come from."""

    tool_names: tuple[str, ...]
    argument_names: tuple[str, ...]
    descriptions: tuple[str, ...]
    one: tuple[str, ...]
    several: tuple[str, ...]
    both: tuple[str, ...]
    answers: tuple[str, ...]
    key: Callable[[random.Random], str]
    value: Callable[[random.Random], int | str]


@dataclass
class World:
    """The tools of one dialogue and what they answer."""

    rng: random.Random
    topic: Topic
    lookup: ToolWords
    multiply: ToolWords
    add: ToolWords
    sums: bool
    others: tuple[ToolWords, ...] = ()
    table: dict[str, int | str] = field(default_factory=dict)

    def value_of(self, key: str) -> int | str:
        if key not in self.table:
            self.table[key] = self.topic.value(self.rng)
        return self.table[key]


def _topics() -> list[tuple[float, Topic]]:
    shop = Topic(
        tool_names=("price", "price", "price", "cost", "get_price", "find_price", "price_of", "catalogue"),
        argument_names=("item", "item", "name", "product", "what"),
        descriptions=("Look up the price of one item.", "Look up the price of one item.", "Find a price.", ""),
        one=("What does a {a} cost?", "What does a {a} cost?", "How much is a {a}?", "What is the price of a {a}?"),
        several=("What do {n} {a}s cost?", "What do {n} {a}s cost?", "How much are {n} {a}s?"),
        both=(
            "What do a {a} and a {b} cost together?",
            "What do a {a} and a {b} cost together?",
            "How much are a {a} and a {b}?",
        ),
        answers=("That costs {v}.", "That is {v}."),
        key=words.any_item,
        value=words.number,
    )
    stock = Topic(
        tool_names=("stock", "count", "in_stock", "get_stock", "amount"),
        argument_names=("item", "name", "thing", "product"),
        descriptions=("How many there are.", "Count the items in stock.", "Look up the stock of an item.", ""),
        one=(
            "How many {a}s are there?",
            "How many {a}s are in stock?",
            "How many {a}s do you have?",
            "What is the stock of the {a}?",
        ),
        several=("What is {n} times the stock of the {a}?",),
        both=("How many {a}s and {b}s are there together?", "What is the stock of {a} and {b} together?"),
        answers=("That is {v}.", "There are {v}.", "There are {v}."),
        key=words.any_item,
        value=words.number,
    )
    facts = [
        _fact("age", "person name who", "How old is {a}?", words.PEOPLE, words.number),
        _fact("phone", "name person", "What is the phone number of {a}?", words.PEOPLE, words.number),
        _fact("weather", "city place where", "What is the weather in {a}?", words.CITIES, words.any_word),
        _fact("distance", "city to place", "How far is it to {a}?", words.CITIES, words.number),
        _fact("capital", "country land", "What is the capital of {a}?", words.COUNTRIES, words.any_word),
        _fact("people", "country city", "How many people live in {a}?", words.COUNTRIES, words.number),
        _fact("meaning", "word term", "What does {a} mean?", words.PLAIN_WORDS, words.any_word),
        _fact("colour", "thing item", "What colour is the {a}?", words.PLAIN_WORDS, words.any_word),
        _fact("owner", "thing item", "Who has the {a}?", words.PLAIN_WORDS, words.any_word),
    ]
    return [(5.0, shop), (1.0, stock)] + [(0.25, fact) for fact in facts]


def _fact(
    attribute: str, arguments: str, question: str, keys: list[str], value: Callable[[random.Random], int | str]
) -> Topic:
    numeric = value is words.number
    return Topic(
        tool_names=(attribute, f"get_{attribute}", f"{attribute}_of", f"find_{attribute}", "lookup"),
        argument_names=tuple(arguments.split()),
        descriptions=(f"Look up the {attribute}.", f"Get the {attribute} of a {arguments.split()[0]}.", ""),
        one=(question, question, f"What is the {attribute} of {{a}}?", f"Tell me the {attribute} of {{a}}."),
        several=(f"What is {{n}} times the {attribute} of {{a}}?",) if numeric else (),
        both=(f"What is the {attribute} of {{a}} and {{b}} together?",) if numeric else (),
        answers=("That is {v}.", "That is {v}.", f"The {attribute} is {{v}}."),
        key=lambda rng: rng.choice(keys) if rng.random() < 0.6 else words.made_up_word(rng).capitalize(),
        value=value,
    )


def _made_up_topic(rng: random.Random) -> Topic:
    """A topic whose tool, argument and question words were never seen."""
    attribute = words.made_up_word(rng) if rng.random() < 0.6 else rng.choice(words.PLAIN_WORDS)
    argument = rng.choice(("key", "name", "x", "id", "of", words.made_up_word(rng), rng.choice(words.PLAIN_WORDS)))
    return _fact(
        attribute,
        argument,
        f"What is the {attribute} of {{a}}?",
        [words.any_item(rng) for _ in range(4)],
        rng.choice((words.number, words.number, words.any_word)),
    )


TOPICS = _topics()


def make_world(rng: random.Random) -> World:
    """A topic and tools named for this dialogue, often as the demo names them; not always with tools for sums."""
    if rng.random() < 0.25:
        topic = _made_up_topic(rng)
    else:
        topic = rng.choices([t for _, t in TOPICS], [w for w, _ in TOPICS])[0]
    name = words.made_up_word(rng) if rng.random() < 0.1 else rng.choice(topic.tool_names)
    lookup = ToolWords(name, (rng.choice(topic.argument_names),), "string", rng.choice(topic.descriptions))
    a_b = rng.choice((("a", "b"), ("a", "b"), ("a", "b"), ("x", "y"), ("first", "second"), ("left", "right")))
    multiply = ToolWords(
        rng.choice(("multiply", "multiply", "multiply", "times", "mul")),
        a_b,
        "integer",
        rng.choice(("Multiply two numbers.", "Multiply two numbers.", "Multiply.", "")),
    )
    add = ToolWords(
        rng.choice(("add", "add", "add", "plus", "sum")),
        a_b,
        "integer",
        rng.choice(("Add two numbers.", "Add two numbers.", "Add.", "")),
    )
    others: tuple[ToolWords, ...] = ()
    if rng.random() < 0.2:
        others = (ToolWords(words.made_up_word(rng), ("name",), "string", ""),)
    sums = rng.random() < (0.75 if topic.several else 0.3)
    return World(rng, topic, lookup, multiply, add, sums, others)
