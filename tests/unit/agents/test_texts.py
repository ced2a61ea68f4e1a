"""The texts of an agent: read, exchanged and stored."""

from pathlib import Path

import pytest

from palestra import Agent
from palestra.agents.texts import read_texts, texts_of, with_texts, write_texts
from palestra.core.errors import NotFoundError, UnreadableFileError

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


@pytest.fixture
def agent() -> Agent:
    return load(SOURCE)


def test_the_texts_of_an_agent_come_back(agent: Agent) -> None:
    texts = texts_of(agent)
    assert texts == {
        "instructions": "Use the tools. Say «done».",
        "tool price": "Look up a price.\nitem: The item's name.\nshop: Which shop.",
    }
    same = with_texts(agent, texts)
    assert texts_of(same) == texts
    assert same.tools[0].schema == agent.tools[0].schema


def test_new_texts_reach_the_schema_and_the_old_agent_keeps_its_own(agent: Agent) -> None:
    new = with_texts(
        agent, {"instructions": "Hi.", "tool price": "Price of one item.\n- item: Singular,\n  no article."}
    )
    function = new.tools[0].schema["function"]
    assert new.instructions == "Hi."
    assert function["description"] == "Price of one item."
    assert function["parameters"]["properties"]["item"]["description"] == "Singular, no article."
    assert function["parameters"]["properties"]["shop"]["description"] == "Which shop."
    assert agent.tools[0].schema["function"]["description"] == "Look up a price."
    assert new.tools[0](item="x") == 3
    with pytest.raises(NotFoundError, match="tool price"):
        with_texts(agent, {"tool prize": "x"})


def test_texts_are_stored_and_a_wrong_file_is_explained(tmp_path: Path) -> None:
    write_texts(tmp_path / "t.json", {"instructions": "Hé"})
    assert read_texts(tmp_path / "t.json") == {"instructions": "Hé"}
    (tmp_path / "bad.json").write_text("[]")
    for name in ("bad.json", "none.json"):
        with pytest.raises(UnreadableFileError, match="palestra improve"):
            read_texts(tmp_path / name)
