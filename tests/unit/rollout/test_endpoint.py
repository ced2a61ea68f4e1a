"""A chat endpoint plays by the rules of a token policy: one budget for all turns, a seed of its own for each."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from scripted import ANSWER, CALL, ScriptedEnvironment, ScriptedPolicy

from palestra.core.types import Problem, Rollout, SamplingParams
from palestra.models.chat.template import ChatFormat
from palestra.policy.openai import OpenAIChat, OpenAISettings
from palestra.rollout.agent_loop import AttemptLimits
from palestra.rollout.collect import Collector, endpoint_speakers, seed_of, token_speakers

QUESTION = Problem("p", "What is 2 + 3?")


class Endpoint(BaseHTTPRequestHandler):
    """Calls the tool twice, then answers; says how many tokens that took if `usage` is set."""

    requests: ClassVar[list[dict[str, Any]]]
    usage: ClassVar[list[int] | None] = None
    url: ClassVar[str]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(body)
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
        message = {"content": None, "tool_calls": [call]} if turn < 2 else {"content": "It is 5."}
        answer: dict[str, Any] = {"choices": [{"message": message, "finish_reason": "stop"}]}
        if self.usage is not None:
            answer["usage"] = {"completion_tokens": self.usage[turn]}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def endpoint() -> Iterator[type[Endpoint]]:
    class Fresh(Endpoint):
        requests: ClassVar[list[dict[str, Any]]] = []

    server = ThreadingHTTPServer(("127.0.0.1", 0), Fresh)
    Fresh.url = f"http://127.0.0.1:{server.server_port}/v1"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Fresh
    server.shutdown()
    server.server_close()


def attempt(endpoint: Any, budget: int, **limits: Any) -> Rollout:
    chat = OpenAIChat(OpenAISettings(model_name="m", base_url=endpoint.url))
    sampling = AttemptLimits(SamplingParams(budget, temperature=0.5, top_p=0.9), **limits)
    collector = Collector(ScriptedEnvironment(), sampling, endpoint_speakers(chat))
    (group,) = asyncio.run(collector.collect([QUESTION], 1, ["key"]))
    return group.rollouts[0]


def test_the_budget_counts_the_tokens_of_all_turns(endpoint):
    endpoint.usage = [30, 25, 9]
    rollout = attempt(endpoint, 100)
    assert rollout.stop == "answered"
    assert rollout.passed
    assert [request["max_tokens"] for request in endpoint.requests] == [100, 70, 45]
    assert rollout.turns == (), "without token ids there is nothing to train"


def test_a_budget_that_is_used_up_ends_the_attempt(endpoint):
    endpoint.usage = [30, 25, 9]
    rollout = attempt(endpoint, 55)
    assert rollout.stop == "truncated"
    assert [request["max_tokens"] for request in endpoint.requests] == [55, 25]
    assert len(rollout.tool_results) == 2


def test_an_endpoint_that_does_not_count_is_guessed_by_the_text(endpoint):
    rollout = attempt(endpoint, 100)
    first, second, third = (request["max_tokens"] for request in endpoint.requests)
    assert first == 100 > second > third > 0
    assert rollout.stop == "answered"


def test_every_turn_has_a_seed_of_its_own_by_the_rule_of_token_policies(endpoint, tiny_tokenizer):
    attempt(endpoint, 100)
    policy = ScriptedPolicy(tiny_tokenizer, [CALL, CALL, ANSWER])
    limits = AttemptLimits(SamplingParams(400))
    collector = Collector(ScriptedEnvironment(), limits, token_speakers(policy, ChatFormat(tiny_tokenizer)))
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
