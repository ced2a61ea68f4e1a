"""New texts are written into the file of an agent."""

import pytest

from palestra import Agent
from palestra.agents.texts import texts_of
from palestra.extras.improve.improve import edit_source

SOURCE = '''from palestra import Agent, function_tool


@function_tool
def price(item: str, shop: str = "main") -> int:
    """Look up a price.

    Args:
        item: The item's name.
        shop: Which shop.
    """
    return 3


agent = Agent(
    "clerk",
    "palestra/tiny",
    "Use the tools. "
    "Say «done».",
    tools=[price],
)
'''


def load(source: str) -> Agent:
    names: dict = {}
    exec(source, names)
    return names["agent"]


@pytest.mark.parametrize("instructions", ['One\n"two"', 'Say «x» \\ "y".', 'Ends with """'])
def test_a_file_gets_the_new_texts_and_nothing_else_changes(instructions: str) -> None:
    old = texts_of(load(SOURCE))
    new = {"instructions": instructions, "tool price": "The price.\nitem: Its singular.\nshop: Which shop."}
    edited, missing = edit_source(SOURCE, old, new)
    assert missing == []
    assert texts_of(load(edited)) == new
    assert "return 3" in edited
    assert 'shop: str = "main"' in edited


def test_a_text_that_stands_nowhere_or_twice_is_not_written() -> None:
    old = {"instructions": "Use the tools."}
    doubled = 'a = "Use the tools."\nb = "Use the tools."\n'
    for source in (doubled, "a = 1\n"):
        assert edit_source(source, old, {"instructions": "New."}) == (source, ["instructions"])
