"""Look-ups in a catalogue."""

from __future__ import annotations

import random
from typing import Any

from palestra.core.types import Score
from palestra.envs.env import Env
from palestra.evals.measures import fail_reason, pass_reason
from palestra.extras.environments.calculator import is_number

_SIZES = "small medium large tall wide".split()
_MATERIALS = "oak glass steel cotton wool paper clay silver".split()
_THINGS = "lamp chair bowl bag frame clock box shelf basket vase".split()
FIELDS = ("price", "weight", "stock")


class Catalogue(Env):
    """Answer questions about a shop's goods by looking them up."""

    name = "catalogue"
    works_in_forks = True
    instructions = "You answer customers of a shop. Look everything up in the catalogue; do not guess."

    def setup(self) -> None:
        rng = random.Random(f"catalogue/{self.config.seed}")
        items = [f"{s} {m} {t}" for s in _SIZES for m in _MATERIALS for t in _THINGS]
        self.goods = {item: {field: rng.randint(2, 400) for field in FIELDS} for item in items}

    def make_problem(self, rng: random.Random) -> Any:
        one, other = rng.sample(sorted(self.goods), 2)
        field = rng.choice(FIELDS)
        mine, theirs = self.goods[one][field], self.goods[other][field]
        row = {"items": (one, other), "field": field}
        match rng.randrange(3):
            case 0:
                return row | {"input": f"What is the {field} of the {one}?", "expect": mine}
            case 1:
                question = f"What is the {field} of the {one} and the {other} together?"
                return row | {"input": question, "expect": mine + theirs}
            case _:
                question = f"Which has the higher {field}, the {one} or the {other}? Say 'equal' if neither."
                expect = "equal" if mine == theirs else max((mine, one), (theirs, other))[1]
                return row | {"input": question, "expect": expect}

    def look_up(self, item: str) -> dict[str, int]:
        """Price, weight and stock of one item.

        Args:
            item: The item's whole name, such as small oak lamp.
        """
        name = item.strip().lower()
        if name not in self.goods:
            raise ValueError(f"there is no {item!r}; search for part of its name")
        return self.goods[name]

    def search(self, words: str) -> list[str]:
        """The names of items that have all these words, at most 10.

        Args:
            words: One or more words, such as oak lamp.
        """
        terms = words.lower().split()
        return [item for item in self.goods if all(word in item for word in terms)][:10]

    def score(self, answer: str) -> Score:
        expect = self.problem.expect
        if isinstance(expect, int):
            return is_number(answer, expect)
        named = [item for item in (*self.problem.row["items"], "equal") if item in answer.lower()]
        return pass_reason(f"names {expect}") if named == [expect] else fail_reason(f"names {named}, expected {expect}")
