"""A full context and a used-up token budget are reported in the words by which clients recognise them."""

import re

import anthropic
import httpx
import openai
import pytest
from real_gateway import open_attempt, with_attempt, with_gateway
from scripted_model import END, QUESTION, completer

from palestra.core.types import SamplingParams

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


def test_a_prompt_beyond_the_context_is_recognised_by_the_clients_of_every_dialect(model):
    text = with_attempt(model, lambda attempt: refusals(attempt, LONG))
    assert re.search(r"prompt is too long: \d+ tokens > 2048 maximum", text)
    assert "maximum context length is 2048 tokens" in text


def test_a_used_up_token_budget_is_recognised_like_a_full_context(tiny_tokenizer):
    async def ask(attempt):
        client = openai.AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.api_key, max_retries=0)
        reply = await client.chat.completions.create(model="m", messages=[QUESTION])
        said = {"role": "assistant", "content": reply.choices[0].message.content}
        text = await refusals(attempt, [QUESTION, said, QUESTION])
        assert "rollout.max_new_tokens" in text
        return await attempt.finish()

    model = completer(tiny_tokenizer, lambda i: f"Yes.{END}")
    size = len(tiny_tokenizer(f"Yes.{END}")["input_ids"])
    rollout = with_attempt(model, ask, sampling=SamplingParams(max_new_tokens=size))
    assert rollout.stop == "truncated"


def test_error_codes_are_texts(model):
    async def ask(gateway):
        async with httpx.AsyncClient(base_url=open_attempt(gateway).base_url, trust_env=False) as client:
            answers = [
                await client.post("/chat/completions", json={"messages": []}),
                await client.post(f"{gateway.url}/attempt/x/v1/chat/completions", json={}),
                await client.post("/nothing"),
                await client.get("/chat/completions"),
            ]
        return [answer.json()["error"]["code"] for answer in answers]

    codes = with_gateway(model, ask)
    assert codes == ["invalid_request", "invalid_api_key", "not_found", "method_not_allowed"]
