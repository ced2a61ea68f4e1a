"""A multi-call agent for a model of a billion parameters or more: look things up, calculate, answer with a number.

palestra train examples/planner.py --model.name Qwen/Qwen2.5-1.5B-Instruct
"""

import random

from palestra import Agent, EvalSuite, fail_reason, function_tool, measure, pass_reason

ITEMS = "bolt nut screw washer hinge bracket nail hook clamp spring".split()
WAREHOUSES = ["north", "south", "harbour"]
rng = random.Random(3)
STOCK = {(item, place): rng.randrange(12, 400) for item in ITEMS for place in WAREHOUSES}
RESERVED = {item: rng.randrange(3, 60) for item in ITEMS}


@function_tool
def stock(item: str, warehouse: str) -> int:
    """How many pieces of an item (singular) a warehouse (north, south or harbour) holds."""
    return STOCK[item, warehouse]


@function_tool
def reserved(item: str) -> int:
    """How many pieces of an item (singular) are reserved over all warehouses."""
    return RESERVED[item]


@function_tool
def calculate(a: int, operator: str, b: int) -> int:
    """Add (+), subtract (-) or multiply (*) two whole numbers."""
    return {"+": a + b, "-": a - b, "*": a * b}[operator]


@measure
def right(ctx):
    answer = ctx.final_assistant_message.text.replace(",", "")
    words = answer.replace(".", " ").replace("*", " ").split()
    return pass_reason("right") if str(ctx.expect) in words else fail_reason(f"not {ctx.expect}: {answer[:100]}")


def make_cases() -> list[dict]:
    cases = []
    for item in ITEMS:
        for first in WAREHOUSES:
            for second in WAREHOUSES:
                if first < second:
                    together = STOCK[item, first] + STOCK[item, second] - RESERVED[item]
                    question = (
                        f"How many {item}s do {first} and {second} hold together, after what is reserved is taken off?"
                    )
                    cases.append({"input": question, "expect": together})
                    question = f"By how many {item}s does {first} differ from {second}? Give {first} minus {second}."
                    cases.append({"input": question, "expect": STOCK[item, first] - STOCK[item, second]})
        for place in WAREHOUSES:
            times = rng.randrange(2, 9)
            question = f"If {place} gets {times} times as many {item}s as it holds now, how many is that?"
            cases.append({"input": question, "expect": STOCK[item, place] * times})
    rng.shuffle(cases)
    return cases


agent = Agent(
    "planner",
    model="palestra/tiny",
    instructions="You plan a hardware store's stock. Look everything up with the tools, calculate with the tool, and "
    "answer in one short sentence with the number.",
    tools=[stock, reserved, calculate],
)
suite = EvalSuite.from_records(make_cases(), measures=[right])
