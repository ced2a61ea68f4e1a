"""What an agent sends to the gateway, writes or starts can fail its own attempt only."""

import json
import sys
import threading
from pathlib import Path

import httpx
import program_groups
import pytest

from palestra import EvalSuite, demo
from palestra.agents.programs import command_agent, function_agent
from palestra.core.config import RunConfig
from palestra.core.group_codec import rollout_to_dict
from palestra.envs.suite_env import SuiteEnvironment
from palestra.servers.openai.completer import MAX_INLINE_CHARS
from palestra.servers.openai.inference import load_completer

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "servers" / "gateway"))

from real_gateway import with_attempt
from scripted_model import END, TOOL, completer

CONFIG = RunConfig.build({"rollout.temperature": 1.0, "rollout.max_new_tokens": 20, "rollout.group_size": 2})
DEEP = "[" * 100_000
ASK = {"model": "any", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4}


@pytest.fixture(scope="module")
def model():
    return load_completer("palestra/tiny")


def collect(model, program):
    """One group of a program's attempts at one case of the demo."""
    environment = SuiteEnvironment(demo.agent, EvalSuite(demo.suite.cases[:1], demo.suite.measures))
    return program_groups.collect(model, environment, program, CONFIG)[0]


def forged(arguments):
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [*ASK["messages"], {"role": "assistant", "tool_calls": [call]}]


@pytest.mark.parametrize(
    "fields",
    [
        {"grammar": "start: x"},
        {"messages": forged(DEEP)},
        {"messages": forged("[" * 500 + "]" * 500)},
        {"messages": forged('{"a": ' * 400 + "1" + "}" * 400), "tools": [TOOL]},
    ],
    ids=["grammar", "brackets without end", "a deep list", "a deep object"],
)
def test_a_hostile_request_is_answered_below_500_and_fails_no_other_attempt(model, fields):
    statuses = []

    async def agent(case, base_url, api_key):
        async with httpx.AsyncClient(base_url=base_url, headers={"Authorization": f"Bearer {api_key}"}) as client:
            statuses.append((await client.post("/chat/completions", json=ASK | fields, timeout=60)).status_code)
            assert (await client.post("/chat/completions", json=ASK, timeout=60)).status_code == 200

    group = collect(model, function_agent(agent))
    assert all(status < 500 for status in statuses)
    assert [rollout.error for rollout in group.rollouts] == [None, None]
    for rollout in group.rollouts:
        json.dumps(rollout_to_dict(rollout))


def test_a_result_file_of_brackets_fails_no_run(model, tmp_path):
    program = tmp_path / "agent.py"
    program.write_text(
        "import json, os, urllib.request\n"
        f"body = json.dumps({ASK!r}).encode()\n"
        "headers = {'Content-Type': 'application/json', 'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()\n"
        "open(os.environ['PALESTRA_RESULT_FILE'], 'w').write('[' * 100_000)\n"
    )
    group = collect(model, command_agent([sys.executable, str(program)]))
    assert [rollout.error for rollout in group.rollouts] == [None, None]


def test_an_unexpected_error_of_an_agent_fails_its_attempt_alone(model):
    class Broken(type(function_agent(print))):
        async def run(self, case, endpoint, limits):
            raise RecursionError("too deep")

    group = collect(model, Broken("broken"))
    assert all("RecursionError" in rollout.error for rollout in group.rollouts)


def test_the_gateway_tokenises_no_long_text_on_its_event_loop(tiny_tokenizer):
    loop_thread, longest = threading.get_ident(), [0]

    class Watched:
        """A tokenizer backend that notes how much text the event loop's thread gives it at once."""

        def __init__(self, backend):
            self._backend = backend

        def __getattr__(self, name):
            return getattr(self._backend, name)

        def __setattr__(self, name, value):
            object.__setattr__(self, name, value) if name == "_backend" else setattr(self._backend, name, value)

        def encode(self, text, **options):
            self._note(text)
            return self._backend.encode(text, **options)

        def encode_batch(self, texts, **options):
            self._note("".join(texts))
            return self._backend.encode_batch(texts, **options)

        def encode_batch_fast(self, texts, **options):
            self._note("".join(texts))
            return self._backend.encode_batch_fast(texts, **options)

        def _note(self, text):
            if threading.get_ident() == loop_thread:
                longest[0] = max(longest[0], len(text))

    model = completer(tiny_tokenizer, lambda i: f"Yes.{END}", context=80_000)
    for each in (model, model.twin):
        each.chat._segments._backend = Watched(each.chat._segments._backend)
    long = "many words " * 8000  # it fits the context
    too_long = "many words " * 30_000  # it may fit by its length alone, and does not

    async def agent(attempt):
        headers = {"Authorization": f"Bearer {attempt.api_key}"}
        async with httpx.AsyncClient(base_url=attempt.anthropic_base_url, headers=headers, timeout=300) as client:
            await client.post("/v1/messages/count_tokens", json={"model": "m", "messages": ASK["messages"]})
            first = {"role": "user", "content": long}
            said = await client.post("/v1/chat/completions", json={"messages": [first]})
            assert said.is_success, said.text
            reply = said.json()["choices"][0]["message"]
            more = [first, reply, {"role": "user", "content": long[:30_000]}]
            went_on = await client.post("/v1/chat/completions", json={"messages": more})
            counted = await client.post("/v1/messages/count_tokens", json={"model": "m", "messages": [first]})
            refused = [
                await client.post(
                    path, json={"model": "m", "messages": [{"role": "user", "content": too_long}], **more}
                )
                for path, more in (
                    ("/v1/chat/completions", {}),
                    ("/v1/messages", {"max_tokens": 5}),
                    ("/v1/messages/count_tokens", {}),
                )
            ]
        assert (said.status_code, went_on.status_code, counted.status_code) == (200, 200, 200)
        assert counted.json()["input_tokens"] == said.json()["usage"]["prompt_tokens"]
        assert [answer.status_code for answer in refused] == [400, 400, 400]
        return await attempt.finish()

    rollout = with_attempt(model, agent)
    assert 0 < longest[0] <= MAX_INLINE_CHARS
    assert rollout.turns[0] == model.chat.prompt(rollout.messages[:1])  # as without a thread


def test_a_request_that_cannot_fit_is_refused_before_it_is_tokenised_by_the_gateway(tiny_tokenizer, monkeypatch):
    model = completer(tiny_tokenizer, lambda i: f"Yes.{END}", context=2048)

    def tokenised(*args, **options):
        raise AssertionError("tokenised")

    for each in (model, model.twin):
        monkeypatch.setattr(each.chat, "prompt", tokenised)
    text = "x" * (model.max_characters + 1)
    tools = [{"type": "function", "function": {"name": "f", "description": text, "parameters": {}}}]

    async def agent(attempt):
        headers = {"Authorization": f"Bearer {attempt.api_key}"}
        async with httpx.AsyncClient(base_url=attempt.anthropic_base_url, headers=headers, timeout=60) as client:
            message = {"role": "user", "content": text}
            answers = [
                await client.post("/v1/chat/completions", json={"messages": [message]}),
                await client.post("/v1/chat/completions", json={"messages": ASK["messages"], "tools": tools}),
                await client.post("/v1/responses", json={"input": text}),
                await client.post("/v1/messages/count_tokens", json={"model": "m", "messages": [message]}),
            ]
            huge = await client.post("/v1/chat/completions", content=b'{"messages": "' + b"x" * (2 << 20))
        return [(answer.status_code, "prompt is too long" in answer.text) for answer in (*answers, huge)]

    assert with_attempt(model, agent) == [(400, True)] * 5
