import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from palestra import EvalSuite, command_agent, function_tool
from palestra.agents.agent import Agent, agent_examples
from palestra.agents.openai_agents import as_agent
from palestra.agents.tools.run import run_calls
from palestra.core.errors import InputError, PalestraError, UnsupportedError
from palestra.core.types import Message, ToolCall
from palestra.envs.suite_env import SuiteEnvironment


def price(item: str) -> float:
    """Look a price up."""
    return 2.0


def test_plain_functions_become_tools():
    agent = Agent("clerk", "palestra/tiny", "Use the tools.", [price])
    assert [tool.name for tool in agent.tools] == ["price"]
    assert agent.fixed_instructions == "Use the tools."
    assert agent.required_model == "palestra/tiny"
    assert as_agent(agent) is agent


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Agent("clerk", tools=[price, price]), "two tools are named 'price'"),
        (lambda: Agent("clerk", instructions=lambda c, a: "hi").fixed_instructions, r"a function.*Pass a string"),
        (lambda: Agent("clerk").required_model, r"'clerk' has no model.*palestra/tiny"),
        (lambda: as_agent({"name": "clerk"}), "expected an agent, got dict"),
        (lambda: Agent("clerk", tools=price), r"tools of agent 'clerk' is a function; expected a list"),
        (lambda: Agent("clerk", modell="palestra/tiny"), r"no argument 'modell'.*'model'"),
    ],
    ids=["tools", "instructions", "model", "dict", "one tool", "argument"],
)
def test_what_cannot_be_trained_is_refused_with_the_remedy(make, words):
    with pytest.raises(PalestraError, match=words):
        make()


QUESTION = {"role": "user", "content": "Tea?"}
CALL = {"id": "a", "function": {"name": "price", "arguments": '{"item": "tea"}'}}
EXAMPLE = [
    QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "2.0"},
    {"role": "assistant", "content": "It costs 2."},
]


class TestExamples:
    def test_lists_of_messages_records_and_files_are_taken_with_instructions_and_tools(self, tmp_path):
        file = tmp_path / "examples.jsonl"
        file.write_text(json.dumps({"messages": EXAMPLE}) + "\n")
        own = [Message("system", "Own."), Message("user", "Hi"), Message("assistant", "Ho")]
        agent = Agent("clerk", instructions="Use the tools.", tools=[price], examples=[EXAMPLE, own, file])
        first, second, third = agent_examples(agent)
        assert [m.role for m in first.messages] == ["system", "user", "assistant", "tool", "assistant"]
        assert first.messages[0].text == "Use the tools."
        assert second.messages == tuple(own)
        assert third.messages == first.messages
        assert first.tool_names == ("price",)
        assert agent_examples(Agent("clerk", tools=[price], examples=str(file)))[0].messages == first.messages[1:]
        assert agent_examples(Agent("clerk", instructions=lambda c, a: "hi")) == [], "none unless given"
        program = replace(command_agent(["python", "shop.py"]), examples=[EXAMPLE])
        assert len(agent_examples(program)) == 1, "programs have tools of their own"

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"examples": [EXAMPLE]}, "example 0 of agent 'clerk' calls 'price'.*has no tools"),
            ({"examples": [EXAMPLE], "tools": [function_tool(name="prices")(price)]}, "Did you mean 'prices'"),
            ({"examples": [[QUESTION]]}, "example 0 .* no assistant message"),
            ({"examples": [[{"role": "bot", "content": "x"}]]}, "the role 'bot'"),
            ({"examples": ["none.jsonl"]}, "none.jsonl cannot be read"),
            ({"examples": [EXAMPLE[0]]}, "the format"),
            ({"examples": [7]}, "Give a list of messages"),
        ],
    )
    def test_a_wrong_example_is_refused_when_the_agent_is_made(self, options, words):
        with pytest.raises(PalestraError, match=words):
            Agent("clerk", **options)


class TestOpenAIAgents:
    @pytest.fixture
    def sdk(self):
        return pytest.importorskip("agents", reason="openai-agents is not installed")

    def test_an_agent_of_the_sdk_is_taken_as_it_is(self, sdk):
        theirs = sdk.Agent(name="clerk", model="Qwen/Qwen3-0.6B", instructions="Hi.", tools=[sdk.function_tool(price)])
        ours = as_agent(theirs)
        assert (ours.name, ours.model, ours.instructions) == ("clerk", "Qwen/Qwen3-0.6B", "Hi.")
        assert [tool.name for tool in ours.tools] == ["price"]
        bare = as_agent(sdk.Agent(name="clerk"))
        assert (bare.model, bare.fixed_instructions) == (None, "")
        disabled = sdk.Agent(name="clerk", tools=[sdk.function_tool(price, is_enabled=False)])
        assert as_agent(disabled).tools == ()
        from openai import AsyncOpenAI

        model = sdk.OpenAIChatCompletionsModel("Qwen/Qwen3-8B", AsyncOpenAI(api_key="none"))
        assert as_agent(sdk.Agent(name="clerk", model=model)).model == "Qwen/Qwen3-8B"

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"handoffs": ["other"]}, r"has handoffs to other agents \(handoffs\).*Train each agent on its own"),
            ({"output_type": int}, r"has an output type .*check it in a measure"),
            ({"hooks": "hooks"}, r"has hooks \(hooks\)"),
            ({"tool_use_behavior": "stop_on_first_tool"}, r"tool_use_behavior='stop_on_first_tool'.*'run_llm_again'"),
            ({"model_settings": {"tool_choice": "required"}}, r"tool_choice='required'.*no such setting"),
            ({"model_settings": {"temperature": 0.2}}, r"Set rollout\.temperature in the config"),
            ({"model_settings": {"parallel_tool_calls": False}}, r"model_settings\.parallel_tool_calls=False"),
        ],
    )
    def test_what_training_would_not_see_is_refused_with_what_to_do(self, sdk, change, words):
        made = {
            "handoffs": lambda names: [sdk.Agent(name=name) for name in names],
            "hooks": lambda _: sdk.AgentHooks(),
            "model_settings": lambda settings: sdk.ModelSettings(**settings),
        }
        change = {key: made.get(key, lambda value: value)(value) for key, value in change.items()}
        with pytest.raises(UnsupportedError, match=words):
            as_agent(sdk.Agent(name="clerk", model="palestra/tiny", **change))

    def test_settings_that_change_nothing_are_fine(self, sdk):
        settings = sdk.ModelSettings(tool_choice="auto", parallel_tool_calls=True, store=False, metadata={"a": "b"})
        assert as_agent(sdk.Agent(name="clerk", model="palestra/tiny", model_settings=settings)).name == "clerk"
        assert as_agent(sdk.Agent(name="clerk")).name == "clerk", "the defaults of the SDK's own default model"

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"needs_approval": True}, r"'price' asks a person before it runs.*\(needs_approval\)"),
            ({"needs_approval": lambda *_: False}, r"\(needs_approval\)"),
            ({"is_enabled": lambda *_: True}, r"enabled by a function \(is_enabled\)"),
            ({"tool_input_guardrails": ["guard"]}, r"has guardrails.*\(tool_input_guardrails\)"),
        ],
    )
    def test_a_tool_that_would_run_unapproved_or_unguarded_is_refused(self, sdk, change, words):
        if "tool_input_guardrails" in change:
            guard = sdk.ToolInputGuardrail(lambda data: sdk.ToolGuardrailFunctionOutput.allow())
            change = {"tool_input_guardrails": [guard]}
        with pytest.raises(UnsupportedError, match=words):
            Agent("clerk", tools=[sdk.function_tool(price, **change)])

    def test_an_agent_runs_as_a_tool_with_a_model_object_of_its_own(self, sdk):
        inner = sdk.Agent(name="translator", model="gpt-5")
        with pytest.raises(UnsupportedError, match=r"'translate' is the agent 'translator' \(as_tool\)"):
            as_agent(sdk.Agent(name="clerk", tools=[inner.as_tool("translate", "Translate.")]))
        sdk.set_tracing_disabled(True)
        inner = sdk.Agent(name="translator", model=speaking(sdk, "Bonjour"))
        (tool,) = as_agent(sdk.Agent(name="clerk", tools=[inner.as_tool("translate", "Translate.")])).tools
        (result,) = asyncio.run(run_calls({"translate": tool}, [ToolCall("c", "translate", {"input": "Hello"})], 5.0))
        assert (result.content, result.ok) == ("Bonjour", True)

    def test_a_tool_gets_the_context_of_its_attempt(self, sdk):
        async def put(wrapper: sdk.RunContextWrapper[list], item: str) -> int:
            """Put an item into the cart."""
            wrapper.context.append(item)
            return len(wrapper.context)

        put.__annotations__["wrapper"] = sdk.RunContextWrapper[list]
        agent = as_agent(sdk.Agent(name="clerk", model="palestra/tiny", tools=[sdk.function_tool(put)]))
        suite = EvalSuite.from_records(
            [{"input": "Buy a mug.", "cart": ["lamp"]}], measures=[len], context_fn=lambda record: record["cart"]
        )
        environment = SuiteEnvironment(agent, suite)
        episodes = [environment.open(suite.cases[0]) for _ in range(2)]
        for episode in episodes:
            tools = {tool.name: tool for tool in episode.tools}
            (result,) = asyncio.run(run_calls(tools, [ToolCall("c", "put", {"item": "mug"})], 5.0))
            assert (result.content, result.ok) == ("2", True)
        assert [e.environment for e in episodes] == [["lamp", "mug"]] * 2
        assert suite.cases[0].row["cart"] == ["lamp"]

    def test_a_tool_that_reads_a_context_needs_a_suite_that_makes_one(self, sdk):
        def put(wrapper, item: str) -> int:
            """Put an item into the cart."""
            return len(wrapper.context)

        put.__annotations__["wrapper"] = sdk.RunContextWrapper[list]
        suite = EvalSuite.from_records([{"input": "Buy a mug."}], measures=[len])
        with pytest.raises(InputError, match="tool 'put' takes a context, and the suite makes none"):
            SuiteEnvironment(Agent("clerk", tools=[sdk.function_tool(put)]), suite)
        SuiteEnvironment(Agent("clerk", tools=[sdk.function_tool(price)]), suite)


def speaking(sdk: Any, text: str) -> Any:
    """A model of the SDK that always says the same."""
    from agents.items import ModelResponse
    from agents.usage import Usage
    from openai.types.responses import ResponseOutputMessage, ResponseOutputText

    class Speaks(sdk.Model):
        async def get_response(self, *args: Any, **kwargs: Any) -> ModelResponse:
            part = ResponseOutputText(text=text, type="output_text", annotations=[])
            message = ResponseOutputMessage(
                id="m", content=[part], role="assistant", status="completed", type="message"
            )
            return ModelResponse(output=[message], usage=Usage(), response_id=None)

        def stream_response(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    return Speaks()
