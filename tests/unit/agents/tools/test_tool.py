"""Functions as tools; the state of an attempt, which tools ask for by type and a model never sees."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from palestra import Context, function_tool
from palestra.agents.tools.run import run_calls
from palestra.agents.tools.tool import as_tool, shared_state
from palestra.core.errors import InputError
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


def test_a_model_does_not_see_the_context_and_cannot_give_it():
    assert list(add.parameters["properties"]) == add.parameters["required"] == ["item"]
    assert list(drop.parameters["properties"]) == ["item"]
    assert not call(add.bind(Cart()), item="lamp", cart={"items": []}).ok


def test_every_attempt_has_its_own_context_in_sync_and_async_tools():
    first, second = Cart(), Cart()
    assert call(add.bind(first), item="lamp").content == "lamp"
    assert call(add.bind(second), item="mug").content == "mug"
    assert call(drop.bind(first)).content == "0"
    assert (first.items, second.items) == ([], ["mug"])


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

    with pytest.raises(InputError, match="tool 'both' has two contexts, a and b"):
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


def plus(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


def test_a_function_becomes_a_tool_that_stays_callable():
    tool = function_tool(plus)
    assert tool(2, b=3) == 5
    assert as_tool(tool) is tool
    assert as_tool(plus).schema["type"] == "function"
    function = as_tool(plus).schema["function"]
    assert (function["name"], function["description"]) == ("plus", "Add two numbers.")
    assert function["parameters"]["required"] == ["a"]
    named = function_tool(name="sum", description="Sum up.")(plus)
    assert (named.name, named.description) == ("sum", "Sum up.")
    theirs = function_tool(name_override="look_up", description_override="Find it.")(plus)  # as in openai-agents
    assert (theirs.name, theirs.description) == ("look_up", "Find it.")
    assert list(theirs.params_json_schema["properties"]) == ["a", "b"]


@pytest.mark.parametrize("thing", [3, "add", object(), dict], ids=["int", "str", "object", "class"])
def test_what_is_no_tool_is_refused(thing):
    with pytest.raises(InputError, match=r"is not a tool|pass the function itself"):
        as_tool(thing)


class TestOpenAIAgents:
    @pytest.fixture
    def sdk(self):
        return pytest.importorskip("agents", reason="openai-agents is not installed")

    def test_a_function_tool_of_the_sdk_runs_with_its_own_schema(self, sdk):
        tool = as_tool(sdk.function_tool(plus))
        assert tool.parameters["properties"]["a"]["type"] == "integer"
        assert call(tool, a=2, b=3).content == "5"
        assert call(tool, a=2).content == "3", "a default, although the SDK's strict schema requires all"
        wrong = call(tool, a="2")
        assert not wrong.ok
        assert "is not of type 'integer'" in wrong.content, "found before the SDK converts it"

    def test_an_exception_that_the_sdk_turns_into_text_is_still_a_failure(self, sdk):
        @sdk.function_tool
        def explode(a: int) -> int:
            """Explode."""
            raise ValueError("boom")

        assert not call(as_tool(explode), a=1).ok

    def test_a_hosted_tool_is_refused(self, sdk):
        with pytest.raises(InputError, match="hosted tools"):
            as_tool(sdk.WebSearchTool())
