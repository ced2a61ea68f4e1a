"""`palestra serve` as a person uses it: the official OpenAI and Anthropic clients talk to a process."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator

import anthropic
import httpx
import openai
import pytest

from palestra import function_tool


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.fixture(scope="module")
def url(forkserver) -> Iterator[str]:
    words = ("serve", "palestra/tiny", "--port", "0")
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = forkserver.popen("-m", "palestra", *words, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    yield process.stdout.readline().split()[-1]
    process.send_signal(signal.SIGTERM)
    process.wait(20)


@pytest.fixture
def client(url):
    return openai.OpenAI(base_url=url, api_key="none", timeout=60)


def test_openai_client_completes(client, url):
    assert [model.id for model in client.models.list()] == ["palestra/tiny"]
    answer = client.chat.completions.create(
        model="palestra/tiny", messages=[{"role": "user", "content": "hello"}], n=3, max_completion_tokens=8
    )
    assert len(answer.choices) == 3
    assert all(choice.finish_reason in ("stop", "length") for choice in answer.choices)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def called(client, **more):
    asked = {"model": "palestra/tiny", "tools": [add.schema], "temperature": 0, "max_tokens": 80, **more}
    return client.chat.completions.create(messages=[{"role": "user", "content": "What is 3 + 4?"}], **asked)


def test_openai_client_calls_tools_and_answers_from_the_result(client):
    choice = called(client).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert called(client, tool_choice="none").choices[0].message.tool_calls is None
    assert isinstance(json.loads(call.function.arguments), dict)
    said = [choice.message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "7"}]
    followed = client.chat.completions.create(
        model="palestra/tiny",
        tools=[add.schema],
        max_tokens=40,
        messages=[{"role": "user", "content": "What is 3 + 4?"}, *said],
    )
    assert followed.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_streamed_tool_call_is_the_same_call_and_none_of_it_is_text(client):
    (whole,) = called(client).choices[0].message.tool_calls
    deltas = [piece.choices[0].delta for piece in called(client, stream=True) if piece.choices]
    assert not "".join(delta.content or "" for delta in deltas).strip()
    (call,) = [call for delta in deltas for call in delta.tool_calls or ()]
    assert (call.function.name, call.function.arguments) == (whole.function.name, whole.function.arguments)


def test_anthropic_client_calls_the_tool_that_it_names(url):
    client = anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", timeout=60)
    function = add.schema["function"]
    tool = {"name": function["name"], "input_schema": function["parameters"]}
    answer = client.messages.create(
        model="palestra/tiny",
        max_tokens=200,
        extra_body={"temperature": 0},
        messages=[{"role": "user", "content": "What is 3 + 4?"}],
        tools=[tool],
        tool_choice={"type": "tool", "name": "add"},
    )
    assert {block.name for block in answer.content if block.type == "tool_use"} == {"add"}
    assert answer.stop_reason in ("tool_use", "max_tokens")


def test_other_addresses_need_a_token_and_a_port_in_use_is_said(cli, url):
    assert "token" in cli.error("serve", "palestra/tiny", "--host", "0.0.0.0", "--port", "0")
    assert "cannot be opened" in cli.error("serve", "palestra/tiny", "--port", str(httpx.URL(url).port))
