"""A first environment: how much of what is in stock?

palestra train --env examples/my_first_env.py
"""

import re

from palestra import Env

ITEMS = [f"{colour} {thing}" for colour in ("red", "blue", "green", "black") for thing in ("cup", "hat", "bag")]
STOCK = {item: 11 + 7 * i for i, item in enumerate(ITEMS)}


class Stock(Env):
    """Look up what is in stock, and add."""

    instructions = "Use the tools to answer."
    run_settings = {
        "train": {"max_steps": 12, "problems_per_step": 8},
        "rollout": {"group_size": 8, "temperature": 1.0, "max_new_tokens": 120},
    }

    def make_problem(self, rng):
        one, other = rng.sample(ITEMS, 2)
        return f"How many {one}s and {other}s are there together?", STOCK[one] + STOCK[other]

    def stock(self, item: str) -> int:
        """Look up the stock of an item."""
        return STOCK[item.removesuffix("s")]

    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    def score(self, answer):
        numbers = re.findall(r"\d+", answer)
        return bool(numbers) and int(numbers[-1]) == self.problem.expect
