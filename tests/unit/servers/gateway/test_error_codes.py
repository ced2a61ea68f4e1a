"""Errors have the form of their dialect; a full context and a used-up token budget, the words that clients look for."""

import re
from types import SimpleNamespace

import anthropic
import httpx
import openai
import pytest
from real_gateway import open_attempt
from scripted_model import END, QUESTION, TOOL, completer

from palestra.core.errors import InputError, PalestraError
from palestra.core.types import SamplingParams
from palestra.servers.gateway.request import ToolChoice, grammar_of

LONG = [{"role": "user", "content": "x " * 3000}]
# What libraries look for: litellm 1.106 (also mini-swe-agent), strands 1.62, langchain-openai 1.7, Anthropic's clients.
RECOGNISED = {
    "litellm, openai": r"this model's maximum context length is",
    "litellm, anthropic": r"prompt is too long",
    "strands, openai": r"maximum context length|context_length_exceeded",
    "strands, anthropic": r"prompt is too long:",
    "langchain-openai": r"context_length_exceeded|prompt is too long",
}


def check_error(error, *, has_code):
    text = str(error)
    assert error.status_code == 400
    missing = [name for name, words in RECOGNISED.items() if not re.search(words, text, re.IGNORECASE)]
    assert not missing, (missing, text)
    if has_code:
        assert error.code == "context_length_exceeded"


async def refusals(attempt, messages):
    """The error of each dialect, whole and streamed."""
    chat = openai.AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.api_key, max_retries=0)
    claude = anthropic.AsyncAnthropic(base_url=attempt.anthropic_base_url, api_key=attempt.api_key, max_retries=0)
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as of_chat:
            await chat.chat.completions.create(model="m", messages=messages, stream=stream)
        check_error(of_chat.value, has_code=True)
        with pytest.raises(openai.BadRequestError) as of_responses:
            await chat.responses.create(model="m", input=messages, stream=stream)
        check_error(of_responses.value, has_code=True)
        with pytest.raises(anthropic.BadRequestError) as of_messages:
            await claude.messages.create(model="m", max_tokens=9, messages=messages, stream=stream)
        check_error(of_messages.value, has_code=False)
    return str(of_messages.value)


def test_a_prompt_beyond_the_context_is_recognised_by_the_clients_of_every_dialect(model, with_any_gateway):
    text = with_any_gateway(model, lambda gateway: refusals(open_attempt(gateway), LONG))
    assert re.search(r"prompt is too long: \d+ tokens > 2048 maximum", text)
    assert "maximum context length is 2048 tokens" in text


def test_a_used_up_token_budget_is_recognised_like_a_full_context(tiny_tokenizer, with_any_gateway):
    async def ask(gateway):
        attempt = open_attempt(gateway)
        client = openai.AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.api_key, max_retries=0)
        reply = await client.chat.completions.create(model="m", messages=[QUESTION])
        said = {"role": "assistant", "content": reply.choices[0].message.content}
        text = await refusals(attempt, [QUESTION, said, QUESTION])
        assert "rollout.max_new_tokens" in text
        return await attempt.finish()

    model = completer(tiny_tokenizer, lambda i: f"Yes.{END}")
    size = len(tiny_tokenizer(f"Yes.{END}")["input_ids"])
    rollout = with_any_gateway(model, ask, sampling=SamplingParams(max_new_tokens=size))
    assert rollout.stop == "truncated"


ADD = {"name": "add", "description": "Add.", "input_schema": TOOL["function"]["parameters"]}
FIELDS = {"model": "any", "max_tokens": 100}
MESSAGES = {**FIELDS, "messages": [QUESTION]}
CHAT = {"model": "any", "messages": [QUESTION]}
RESPONSE = {"model": "any", "input": "hi"}
NO_SCHEMA = {"type": "json_schema", "json_schema": "x"}
BAD_SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}

CODES = {"invalid_request", *(cls.code for cls in PalestraError.__subclasses__())}
MALFORMED = [
    ("chat/completions", {"model": "any"}, "messages"),
    ("chat/completions", {**CHAT, "messages": []}, "messages"),
    ("chat/completions", {**CHAT, "messages": [{"role": "king", "content": "x"}]}, "king"),
    ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "not text"),
    ("chat/completions", {**CHAT, "temprature": 1}, "Did you mean 'temperature'"),
    ("chat/completions", {**CHAT, "temperature": -1}, "temperature"),
    ("chat/completions", {**CHAT, "logit_bias": {"1": 2}}, "logit_bias"),
    ("chat/completions", {**CHAT, "tool_choice": "required"}, "no tools"),
    ("chat/completions", {**CHAT, "tools": [TOOL], "tool_choice": {"type": "function", "function": 3}}, "form"),
    ("chat/completions", {**CHAT, "response_format": NO_SCHEMA}, "form"),
    ("chat/completions", {**CHAT, "response_format": BAD_SCHEMA}, "schema"),
    ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": "x " * 9000}]}, "context"),
    ("chat/completions", {**CHAT, "tools": [{"type": "function"}]}, "name"),
    ("responses", {"model": "any"}, "input"),
    ("responses", {**RESPONSE, "input": [{"type": "computer_call"}]}, "computer_call"),
    ("responses", {**RESPONSE, "input": []}, "empty"),
    ("responses", {**RESPONSE, "background": True}, "background"),
    ("responses", {**RESPONSE, "include": ["file_search_call.results"]}, "include"),
    ("messages", {"model": "any", "messages": [QUESTION]}, "max_tokens"),
    ("messages", {**FIELDS, "messages": []}, "messages"),
    ("messages", {**FIELDS, "messages": [{"role": "tool", "content": "x"}]}, "tool"),
    ("messages", {**FIELDS, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
    ("messages", {**FIELDS, "messages": [{"role": "user", "content": 3}]}, "content"),
    ("messages", {**FIELDS, "messages": [QUESTION, {"role": "assistant", "content": "It"}]}, "prefilled"),
    ("messages", {**MESSAGES, "temprature": 1}, "Did you mean 'temperature'"),
    ("messages", {**MESSAGES, "tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}, "sub"),
    (
        "messages",
        {**FIELDS, "messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}, QUESTION]},
        "tool_use",
    ),
]
RUBBISH = (b"", b"{", b"[]", b"null", b"\xff")


def test_a_malformed_request_is_refused_in_the_form_of_its_dialect(model, with_any_gateway):
    async def ask(gateway):
        attempt = open_attempt(gateway)
        async with httpx.AsyncClient(base_url=attempt.base_url, trust_env=False) as client:
            for path, body, says in MALFORMED:
                for stream in ({}, {"stream": True}):
                    answer = await client.post(f"/{path}", json={**body, **stream})
                    error = answer.json()
                    assert answer.status_code == 400, (path, body, error)
                    assert error["error"]["type"] == "invalid_request_error"
                    assert says in error["error"]["message"], (path, body, error)
                    assert error.get("type") == ("error" if path == "messages" else None)
                    assert path == "messages" or error["error"]["code"] in CODES
            for content in RUBBISH:
                assert (await client.post("/chat/completions", content=content)).status_code == 400, content
            assert (await client.post("/chat/completions?beta=1", json={**CHAT, "max_tokens": 2})).status_code == 200
            for method, path, status, code in (
                ("POST", f"{gateway.url}/attempt/x/v1/messages", 401, None),  # Anthropic's errors have no code
                ("POST", f"{gateway.url}/attempt/x/v1/chat/completions", 401, "invalid_api_key"),
                ("POST", f"{gateway.url}/v1/nothing", 404, "not_found"),
                ("POST", f"{gateway.url}/attempt//v1/messages", 404, None),
                ("POST", f"{gateway.url}/attempt/a/b/v1/messages", 404, None),
                ("POST", "/nothing", 404, "not_found"),
                ("GET", "/messages", 405, None),
                ("GET", "/chat/completions", 405, "method_not_allowed"),
            ):
                answer = await client.request(method, path)
                assert answer.status_code == status, path
                assert answer.json()["error"]["message"]
                assert answer.json()["error"].get("code") == code, path

    with_any_gateway(model, ask)


def test_a_schema_whose_patterns_are_very_long_is_refused_before_it_is_compiled():
    chat = SimpleNamespace(stop_token_ids=(1,), closes_reasoning=lambda variables: "")
    model = SimpleNamespace(chat=chat)

    def grammar(alternatives: int) -> str | None:
        pattern = "|".join(f'"{i}' for i in range(alternatives))
        schema = {"properties": {"pattern": {"type": "string", "pattern": pattern}}}
        return grammar_of(model, [], ToolChoice("auto"), schema, {})

    assert grammar(500)
    with pytest.raises(InputError):
        grammar(20_000)
