import asyncio

import pytest

from palestra.agents.tools.run import run_calls
from palestra.agents.tools.tool import as_tool, function_tool
from palestra.core.errors import PalestraError
from palestra.core.types import ToolCall


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


def test_a_function_becomes_a_tool_that_stays_callable():
    tool = function_tool(add)
    assert tool(2, b=3) == 5
    assert as_tool(tool) is tool
    assert as_tool(add).schema["type"] == "function"
    function = as_tool(add).schema["function"]
    assert (function["name"], function["description"]) == ("add", "Add two numbers.")
    assert function["parameters"]["required"] == ["a"]
    plus = function_tool(name="plus", description="Sum up.")(add)
    assert (plus.name, plus.description) == ("plus", "Sum up.")


@pytest.mark.parametrize("thing", [3, "add", object(), dict], ids=["int", "str", "object", "class"])
def test_what_is_no_tool_is_refused(thing):
    with pytest.raises(PalestraError, match=r"is not a tool|pass the function itself"):
        as_tool(thing)


class TestOpenAIAgents:
    @pytest.fixture
    def sdk(self):
        return pytest.importorskip("agents", reason="openai-agents is not installed")

    def run(self, tool, **arguments):
        return asyncio.run(run_calls({tool.name: tool}, [ToolCall("c", tool.name, arguments)], 10))[0]

    def test_a_function_tool_of_the_sdk_runs_with_its_own_schema(self, sdk):
        tool = as_tool(sdk.function_tool(add))
        assert tool.parameters["properties"]["a"]["type"] == "integer"
        assert self.run(tool, a=2, b=3).content == "5"
        assert self.run(tool, a=2).content == "3", "a default, although the SDK's strict schema requires all"

    def test_wrong_arguments_are_found_before_the_sdk_converts_them(self, sdk):
        result = self.run(as_tool(sdk.function_tool(add)), a="2")
        assert not result.ok
        assert "'a' should be of type integer" in result.content

    def test_an_exception_that_the_sdk_turns_into_text_is_still_a_failure(self, sdk):
        @sdk.function_tool
        def explode(a: int) -> int:
            """Explode."""
            raise ValueError("boom")

        result = self.run(as_tool(explode), a=1)
        assert not result.ok

    def test_a_hosted_tool_is_refused(self, sdk):
        with pytest.raises(PalestraError, match="hosted tools"):
            as_tool(sdk.WebSearchTool())


def test_names_of_openai_agents_are_taken():
    @function_tool(name_override="look_up", description_override="Find it.")
    def price(item: str) -> float:
        """Look up a price."""
        return 1.0

    assert (price.name, price.description) == ("look_up", "Find it.")
    assert list(price.params_json_schema["properties"]) == ["item"]
