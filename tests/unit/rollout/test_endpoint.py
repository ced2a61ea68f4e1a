"""A chat endpoint plays by the rules of a token policy: one budget for all turns, a seed of its own for each."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from scripted import ANSWER, CALL, ScriptedEnvironment, ScriptedPolicy
from served import json_app, served

from palestra.core.types import Problem, Rollout, SamplingParams
from palestra.models.chat.template import ChatFormat
from palestra.policy.openai import OpenAIChat, OpenAISettings
from palestra.rollout.agent_loop import AttemptLimits, endpoint_speakers, token_speakers
from palestra.rollout.collect import AgentLoop, Collector, seed_of

QUESTION = Problem("p", "What is 2 + 3?")


class Endpoint:
    """Calls the tool twice, then answers; says how many tokens that took if `usage` is set."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.usage: list[int] | None = None
        self.url = ""

    async def respond(self, request: Any) -> Any:
        body = await request.json()
        self.requests.append(body)
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
        message = {"content": None, "tool_calls": [call]} if turn < 2 else {"content": "It is 5."}
        usage = {} if self.usage is None else {"usage": {"completion_tokens": self.usage[turn]}}
        return {"choices": [{"message": message, "finish_reason": "stop"}]} | usage


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint()
    with served(json_app(made.respond)) as url:
        made.url = f"{url}/v1"
        yield made


def attempt(endpoint: Any, budget: int, **limits: Any) -> Rollout:
    chat = OpenAIChat(OpenAISettings(model_name="m", base_url=endpoint.url))
    sampling = AttemptLimits(SamplingParams(budget, temperature=0.5, top_p=0.9), **limits)
    collector = Collector(ScriptedEnvironment(), AgentLoop(sampling, endpoint_speakers(chat)))
    (group,) = asyncio.run(collector.collect([QUESTION], 1, ["key"]))
    return group.rollouts[0]


@pytest.mark.parametrize(("budget", "stop", "asked"), [(100, "answered", [100, 70, 45]), (55, "truncated", [55, 25])])
def test_the_budget_counts_the_tokens_of_all_turns(endpoint, budget, stop, asked):
    endpoint.usage = [30, 25, 9]
    rollout = attempt(endpoint, budget)
    assert rollout.stop == stop
    assert rollout.passed
    assert [request["max_tokens"] for request in endpoint.requests] == asked
    assert len(rollout.tool_results) == 2
    assert rollout.turns == (), "without token ids there is nothing to train"


def test_an_endpoint_that_does_not_count_is_guessed_by_the_text(endpoint):
    rollout = attempt(endpoint, 100)
    first, second, third = (request["max_tokens"] for request in endpoint.requests)
    assert first == 100 > second > third > 0
    assert rollout.stop == "answered"


def test_every_turn_has_a_seed_of_its_own_by_the_rule_of_token_policies(endpoint, tiny_tokenizer):
    attempt(endpoint, 100)
    policy = ScriptedPolicy(tiny_tokenizer, [CALL, CALL, ANSWER])
    limits = AttemptLimits(SamplingParams(400))
    collector = Collector(ScriptedEnvironment(), AgentLoop(limits, token_speakers(policy, ChatFormat(tiny_tokenizer))))
    asyncio.run(collector.collect([QUESTION], 1, ["key"]))
    seeds = [params.seed for params in policy.params]
    assert seeds == [seed_of("key/0") + turn for turn in range(3)]
    assert [request["seed"] for request in endpoint.requests] == [seed % 2**31 for seed in seeds]


def test_tool_rounds_are_limited_and_sampling_settings_are_sent(endpoint):
    rollout = attempt(endpoint, 400, max_tool_rounds=1)
    assert rollout.stop == "tool_limit"
    assert len(rollout.tool_results) == 1
    (tool,) = endpoint.requests[0]["tools"]
    assert tool["function"]["name"] == "add"
    assert (endpoint.requests[0]["temperature"], endpoint.requests[0]["top_p"]) == (0.5, 0.9)
