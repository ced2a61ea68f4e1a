"""The state of an attempt: tools ask for it by type, a model never sees it."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from palestra import Context, function_tool
from palestra.agents.tools.run import run_calls
from palestra.agents.tools.tool import shared_state
from palestra.core.errors import PalestraError
from palestra.core.types import ToolCall

STOCK = {"lamp": 3}
SEEN: list[str] = []
COUNT = 0


@dataclass
class Cart:
    items: list[str] = field(default_factory=list)


@function_tool
def add(item: str, cart: Context[Cart]) -> str:
    """Put an item into the cart."""
    cart.items.append(item)
    return ", ".join(cart.items)


@function_tool
async def drop(cart: Context[Cart], item: str = "lamp") -> int:
    """Take an item out of the cart."""
    cart.items.remove(item)
    return len(cart.items)


def call(tool: Any, **arguments: Any) -> Any:
    (result,) = asyncio.run(run_calls({tool.name: tool}, [ToolCall("c", tool.name, arguments)], 5.0))
    return result


def test_a_model_does_not_see_the_context():
    assert list(add.parameters["properties"]) == add.parameters["required"] == ["item"]
    assert list(drop.parameters["properties"]) == ["item"]


def test_every_attempt_has_its_own_context_in_sync_and_async_tools():
    first, second = Cart(), Cart()
    assert call(add.bind(first), item="lamp").content == "lamp"
    assert call(add.bind(second), item="mug").content == "mug"
    assert call(drop.bind(first)).content == "0"
    assert (first.items, second.items) == ([], ["mug"])


def test_a_model_cannot_give_the_context_itself():
    assert not call(add.bind(Cart()), item="lamp", cart={"items": []}).ok


def test_a_tool_says_whether_it_can_do_without():
    def look(item: str, cart: Context[Cart | None] = None) -> str:
        """Look at an item."""
        return item

    assert add.needs_context
    assert not add.bind(Cart()).needs_context
    assert not function_tool(look).needs_context
    assert call(function_tool(look), item="lamp").ok


def test_two_contexts_are_refused():
    def both(a: Context[Cart], b: Context[Cart]) -> str:
        """Take two."""
        return ""

    with pytest.raises(PalestraError, match="tool 'both' has two contexts, a and b"):
        function_tool(both)


# Tools that keep their state where all attempts share it.


def take(item: str) -> int:
    """Take an item."""
    STOCK[item] -= 1
    return STOCK[item]


def remember(item: str) -> str:
    """Remember an item."""
    SEEN.append(item)
    return item


def count() -> int:
    """Count up."""
    global COUNT
    COUNT += 1
    return COUNT


class Shop:
    def __init__(self) -> None:
        self.sold: list[str] = []

    def sell(self, item: str) -> str:
        """Sell an item."""
        self.sold.append(item)
        return item


def reads(item: str) -> str:
    """Only look: the dict and the list that it writes to are its own."""
    found = dict(STOCK)
    found[item] = 1
    names = [*SEEN]
    names.append(json.dumps(found))
    item = item.strip()
    return item


def closes_over() -> Any:
    taken: set[str] = set()

    def once(item: str) -> bool:
        """Whether an item is new."""
        taken.add(item)
        return item in taken

    return once


@pytest.mark.parametrize(
    ("fn", "names"),
    [
        (take, ["STOCK"]),
        (remember, ["SEEN"]),
        (count, ["COUNT"]),
        (closes_over(), ["taken"]),
        (Shop().sell, ["self"]),
        (reads, []),
        (add.fn, []),
        (len, []),
    ],
    ids=["dict", "list", "global", "closure", "method", "reads", "context", "built-in"],
)
def test_changes_of_what_attempts_share_are_found(fn, names):
    assert shared_state(fn) == names
