"""The demo: a shop assistant that must look prices up in a catalogue and compute with them.

`palestra train` without arguments trains this agent; `palestra train my_agent.py` trains a file of
your own, written like this one: an `agent`, a `suite`, and, if you like, `held_out` and `config`.
"""

from __future__ import annotations

import random
import re
from typing import Any

from palestra import Agent, EvalSuite, fail_reason, function_tool, measure, pass_reason

ADJECTIVES = (
    "red blue green black white yellow brown pink grey golden silver small large tall new round wooden plain soft thin"
).split()
NOUNS = (
    "lamp mug chair table desk clock pen book bag ball bowl plate spoon cup hat coat shirt sock belt ring vase basket "
    "candle mirror rug"
).split()
PRICES = range(11, 100)


def is_held_out_price(price: int) -> bool:
    """Prices that only held-out items have: one in four."""
    return price in PRICES and price % 4 == 3


def is_held_out_item(adjective: str, noun: str) -> bool:
    """Items that only held-out cases ask for: one in five; each of their words is in other items too."""
    return (ADJECTIVES.index(adjective) + 2 * NOUNS.index(noun)) % 5 == 0


def _make_catalogue() -> dict[str, int]:
    """Each item's price; held-out items have held-out prices, the others never do."""
    rng = random.Random(7)
    pools = {held_out: [p for p in PRICES if is_held_out_price(p) == held_out] for held_out in (True, False)}
    return {f"{a} {n}": rng.choice(pools[is_held_out_item(a, n)]) for a in ADJECTIVES for n in NOUNS}


CATALOGUE = _make_catalogue()


@function_tool
def price(item: str) -> int:
    """Look up the price of one item.

    Args:
        item: The name of the item.
    """
    name = item.strip().lower().removesuffix("s")
    if name not in CATALOGUE:
        raise ValueError(f"no item {item!r}")
    return CATALOGUE[name]


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


@measure
def right_total(ctx: Any) -> Any:
    """The last number of the answer is the total that was asked for."""
    numbers = re.findall(r"\d+", ctx.final_assistant_message.text)
    if not numbers:
        return fail_reason("the answer names no number")
    if int(numbers[-1]) != ctx.expect:
        return fail_reason(f"the answer says {numbers[-1]}, the total is {ctx.expect}")
    return pass_reason(f"the answer says {ctx.expect}")


def make_cases(count: int, *, held_out: bool, seed: int) -> list[dict[str, Any]]:
    """Different questions of three kinds in turn: one item (1 tool call), several of one (2), two items (3)."""
    rng = random.Random(seed)
    items = [item for item in CATALOGUE if is_held_out_item(*item.split()) == held_out]
    cases: dict[str, int] = {}
    while len(cases) < count:
        first, second = rng.sample(items, 2)
        n = rng.randint(2, 9)
        match len(cases) % 3:
            case 0:
                cases[f"What does a {first} cost?"] = CATALOGUE[first]
            case 1:
                cases[f"What do {n} {first}s cost?"] = n * CATALOGUE[first]
            case _:
                cases[f"What do a {first} and a {second} cost together?"] = CATALOGUE[first] + CATALOGUE[second]
    return [{"question": question, "total": total} for question, total in cases.items()]


def make_suite(cases: list[dict[str, Any]]) -> EvalSuite:
    return EvalSuite.from_records(
        cases, input_fn=lambda row: row["question"], expect_fn=lambda row: row["total"], measures=[right_total]
    )


agent = Agent(
    name="shop-assistant",
    model="palestra/tiny",
    instructions="You work in a shop. Use the tools to answer.",
    tools=[price, multiply, add],
)
suite = make_suite(make_cases(600, held_out=False, seed=1))
held_out = make_suite(make_cases(210, held_out=True, seed=2))
config = {
    "train.scheduler": "linear",
    "train.max_steps": 24,
    "train.problems_per_step": 16,
    "rollout.group_size": 8,
    "rollout.temperature": 1.0,
    "rollout.max_new_tokens": 120,
}
