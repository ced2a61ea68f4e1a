"""Whole dialogues for palestra/tiny: open worlds, shops and other fixed topics, sums, copying, small talk."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace

import tiny_names as names
import tiny_words as words
from tiny_novice import Scribe, Task, answer
from tiny_open_novice import open_dialogue
from tiny_world import Dialogue, World, make_world

from palestra.demo import ADJECTIVES, NOUNS, is_held_out_item, is_held_out_price

COPIED = (
    words.number,
    words.any_item,
    words.any_word,
    names.integer,
    names.decimal,
    names.thing,
    names.proper_name,
    names.code,
    names.argument_name,
)


def dialogues(seed: int) -> Iterator[Dialogue]:
    """Endless dialogues, none of which mentions an item or a price of the demo's held-out cases."""
    rng = random.Random(seed)
    kinds = (open_dialogue, tool_dialogue, sum_dialogue, copy_dialogue, small_talk)
    while True:
        dialogue = rng.choices(kinds, (0.58, 0.23, 0.02, 0.13, 0.04))[0](rng)
        if not mentions_held_out(repr(dialogue)):
            yield dialogue


def mentions_held_out(text: str) -> bool:
    """Whether a text has an item or a price of the held-out cases."""
    words = re.findall(r"[a-z]+|\d+", text.lower())
    if any(word.isdigit() and is_held_out_price(int(word)) for word in words):
        return True
    singular = [word.removesuffix("s") for word in words]
    return any(
        first in ADJECTIVES and second in NOUNS and is_held_out_item(first, second)
        for first, second in zip(words, singular[1:], strict=False)
    )


def tool_dialogue(rng: random.Random) -> Dialogue:
    """One to three questions about one topic."""
    world = make_world(rng)
    scribe = Scribe(world)
    for _ in range(rng.choices((1, 2, 3), (0.6, 0.25, 0.15))[0]):
        answer(scribe, make_task(world))
    if rng.random() < 0.05:
        _chat(rng, scribe)
    return _finish(scribe)


def make_task(world: World) -> Task:
    """A question of one of the three kinds, as far as the topic has them."""
    rng, topic = world.rng, world.topic
    first, second = _two_keys(world)
    world.value_of(first)
    kind = rng.choice(("one", "several", "both")) if topic.several and world.sums else "one"
    if kind == "one":
        form = rng.choice(topic.one)
        return Task(form.format(a=first), first, plural="{a}s" in form)
    if kind == "several":
        form = rng.choice(topic.several)
        n = rng.randint(2, 9)
        return Task(form.format(n=n, a=first), first, n=n, plural="{a}s" in form)
    form = rng.choice(topic.both)
    world.value_of(second)
    return Task(form.format(a=first, b=second), first, second=second, plural="{a}s" in form)


def _two_keys(world: World) -> tuple[str, str]:
    first = world.topic.key(world.rng)
    while True:
        second = world.topic.key(world.rng)
        if second != first:
            return first, second


def sum_dialogue(rng: random.Random) -> Dialogue:
    """Plain arithmetic with a tool for it."""
    scribe = Scribe(replace(make_world(rng), sums=True))
    for _ in range(rng.choice((1, 2))):
        a, b = words.number(rng), words.number(rng)
        times = rng.random() < 0.5
        forms = ("What is {} times {}?", "Multiply {} and {}.") if times else ("What is {} plus {}?", "Add {} and {}.")
        scribe.user(rng.choice(forms).format(a, b))
        course = rng.random()
        if course < 0.6:
            value = (scribe.multiply if times else scribe.add)(a, b)
        elif course < 0.8:
            value = (scribe.add if times else scribe.multiply)(a, b)
        else:
            value = words.number(rng)
        scribe.messages.append({"role": "assistant", "content": f"That is {value}."})
    return _finish(scribe)


def copy_dialogue(rng: random.Random) -> Dialogue:
    """Say after me: the cheapest way to learn to copy."""
    messages = []
    for _ in range(rng.choice((1, 2, 3))):
        parts = [str(rng.choice(COPIED)(rng)) for _ in range(rng.randint(1, 5))]
        text = " ".join(parts)
        messages.append({"role": "user", "content": rng.choice(("Say: {}", "Repeat {}", "Say {}")).format(text)})
        messages.append({"role": "assistant", "content": text})
    return Dialogue(messages, [])


def small_talk(rng: random.Random) -> Dialogue:
    if rng.random() < 0.5:
        scribe = Scribe(make_world(rng))
        _chat(rng, scribe)
        return _finish(scribe)
    messages = []
    for question, reply in rng.sample(words.SMALL_TALK, rng.randint(1, 3)):
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    return Dialogue(messages, [])


def _chat(rng: random.Random, scribe: Scribe) -> None:
    question, reply = rng.choice(words.SMALL_TALK)
    scribe.user(question)
    scribe.messages.append({"role": "assistant", "content": reply})


def _finish(scribe: Scribe) -> Dialogue:
    """The dialogue with a system message and its tools in some order."""
    world, rng = scribe.world, scribe.rng
    tools = [world.lookup, *((world.multiply, world.add) if world.sums else ()), *world.others]
    if rng.random() < 0.5:
        rng.shuffle(tools)
    instructions = rng.choice(words.INSTRUCTIONS)
    system = [{"role": "system", "content": instructions}] if instructions else []
    return Dialogue(system + scribe.messages, [tool.schema() for tool in tools])
