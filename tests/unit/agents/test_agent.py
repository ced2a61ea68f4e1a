import pytest

from palestra.agents.agent import Agent
from palestra.agents.openai_agents import as_agent
from palestra.core.errors import PalestraError


def price(item: str) -> float:
    """Look a price up."""
    return 2.0


def test_plain_functions_become_tools():
    agent = Agent("clerk", "palestra/tiny", "Use the tools.", [price])
    assert [tool.name for tool in agent.tools] == ["price"]
    assert agent.fixed_instructions == "Use the tools."
    assert agent.required_model == "palestra/tiny"


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(PalestraError, match="two tools are named 'price'"):
        Agent("clerk", tools=[price, price])


def test_callable_instructions_are_refused_for_training_with_the_remedy():
    agent = Agent("clerk", instructions=lambda context, agent: "hi")
    with pytest.raises(PalestraError, match=r"'clerk' are a function.*Pass a string"):
        _ = agent.fixed_instructions


def test_no_model_is_refused_with_examples():
    with pytest.raises(PalestraError, match=r"'clerk' has no model.*palestra/tiny"):
        _ = Agent("clerk").required_model


def test_as_agent_gives_ours_back():
    agent = Agent("clerk")
    assert as_agent(agent) is agent


def test_what_is_no_agent_is_refused():
    with pytest.raises(PalestraError, match="expected an agent, got dict"):
        as_agent({"name": "clerk"})


class TestOpenAIAgents:
    @pytest.fixture
    def sdk(self):
        return pytest.importorskip("agents", reason="openai-agents is not installed")

    def test_an_agent_of_the_sdk_is_taken_as_it_is(self, sdk):
        theirs = sdk.Agent(name="clerk", model="Qwen/Qwen3-0.6B", instructions="Hi.", tools=[sdk.function_tool(price)])
        ours = as_agent(theirs)
        assert (ours.name, ours.model, ours.instructions) == ("clerk", "Qwen/Qwen3-0.6B", "Hi.")
        assert [tool.name for tool in ours.tools] == ["price"]

    def test_missing_instructions_and_model_stay_missing(self, sdk):
        ours = as_agent(sdk.Agent(name="clerk"))
        assert (ours.model, ours.fixed_instructions) == (None, "")

    def test_the_name_is_taken_out_of_a_model_object(self, sdk):
        from openai import AsyncOpenAI

        model = sdk.OpenAIChatCompletionsModel("Qwen/Qwen3-8B", AsyncOpenAI(api_key="none"))
        assert as_agent(sdk.Agent(name="clerk", model=model)).model == "Qwen/Qwen3-8B"

    def test_callable_instructions_are_refused_when_training_asks_for_them(self, sdk):
        ours = as_agent(sdk.Agent(name="clerk", instructions=lambda context, agent: "hi"))
        with pytest.raises(PalestraError, match="Pass a string"):
            _ = ours.fixed_instructions

    def test_what_training_would_not_see_is_refused(self, sdk):
        other = sdk.Agent(name="other")
        with pytest.raises(PalestraError, match="has handoffs to other agents"):
            as_agent(sdk.Agent(name="clerk", handoffs=[other]))
        with pytest.raises(PalestraError, match="has an output type"):
            as_agent(sdk.Agent(name="clerk", output_type=int))
