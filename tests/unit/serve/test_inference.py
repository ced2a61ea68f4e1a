"""The inference server over the embedded model: every form, and what goes wrong."""

from __future__ import annotations

import asyncio
import time

import httpx
import openai
import pytest
import torch

from palestra.core.types import Message, SamplingParams
from palestra.core.weights import Weights
from palestra.serve.completer import SamplingRequest, TextStream, certain
from palestra.serve.inference import inference_app
from palestra.serve.loading import load_completer

ASK = [{"role": "user", "content": "What is 3 + 4?"}]
QUESTION = Message("user", "What is 3 + 4?")


@pytest.fixture(scope="module")
def model():
    return load_completer("palestra/tiny")


@pytest.fixture(scope="module")
def url(model, serve):
    return serve(inference_app(model))


@pytest.fixture
def http(url):
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def direct(model, prompt_ids, **params):
    """The same turn by the engine itself."""
    engine = model.policy.engine
    session = engine.open(prompt_ids)
    (sampled,) = engine.sample([session], SamplingParams(stop_token_ids=model.eos, **params))
    engine.close(session)
    return sampled


def test_sglang_form_gives_the_engines_own_ids_and_logprobs(model, http):
    ids = model.chat.prompt([QUESTION]).token_ids.tolist()
    asked = {"max_new_tokens": 12, "temperature": 1.0, "seed": 5, "n": 3, "stop": [1, "zzz"]}
    body = {"input_ids": ids, "sampling_params": asked, "return_logprob": True}
    results = http.post("/generate", json=body).json()
    assert len(results) == 3
    for result in results:
        about = result["meta_info"]
        rows = about["output_token_logprobs"]
        assert about["completion_tokens"] == len(rows)
        assert all(text is None for _, _, text in rows)
        ended = rows[-1][1] in (*model.eos, 1)
        assert about["finish_reason"]["type"] == ("stop" if ended else "length")
    first = direct(model, ids, max_new_tokens=12, seed=5)
    rows = results[0]["meta_info"]["output_token_logprobs"]
    assert [row[1] for row in rows] == first.token_ids.tolist()[: len(rows)]
    assert [row[0] for row in rows] == pytest.approx(first.logprobs.tolist()[: len(rows)], abs=1e-5)


def test_vllm_form_is_told_apart_by_its_fields(model, http):
    ids = model.chat.prompt([QUESTION]).token_ids.tolist()
    body = {"prompt": {"prompt_token_ids": ids}, "logprobs": 0, "n": 2, "max_tokens": 5, "seed": 5}
    result = http.post("/generate", json=body).json()
    assert len(result["text"]) == len(result["finish_reasons"]) == len(result["logprobs"]) == 2
    first = direct(model, ids, max_new_tokens=5, seed=5)
    assert [int(next(iter(entry[0]))) for entry in result["logprobs"][0]] == first.token_ids.tolist()
    assert [next(iter(entry[0].values())) for entry in result["logprobs"][0]] == pytest.approx(
        first.logprobs.tolist(), abs=1e-5
    )


def test_single_sglang_request_is_answered_by_one_object(http):
    result = http.post("/generate", json={"text": "What", "sampling_params": {"max_new_tokens": 2}}).json()
    assert "output_token_logprobs" not in result["meta_info"]
    several = http.post("/generate", json={"text": ["a", "b"], "sampling_params": {"max_new_tokens": 2}}).json()
    assert len(several) == 2


def test_eos_is_among_the_tokens_and_not_in_the_text(model, http):
    ids = model.chat.prompt([QUESTION]).token_ids.tolist()
    for seed in range(20):
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 200, "seed": seed}, "return_logprob": True}
        result = http.post("/generate", json=body).json()
        if result["meta_info"]["finish_reason"]["type"] == "stop":
            break
    last = result["meta_info"]["output_token_logprobs"][-1][1]
    assert last in model.eos
    assert result["meta_info"]["finish_reason"]["matched"] == last
    assert model.tokenizer.decode([last]) not in result["text"]


def test_stop_string_ends_the_text_before_it(client):
    free = client.completions.create(model="m", prompt="What is", max_tokens=12, seed=1, temperature=0)
    stop = free.choices[0].text[3:5]
    cut = client.completions.create(model="m", prompt="What is", max_tokens=12, seed=1, temperature=0, stop=[stop])
    assert cut.choices[0].text == free.choices[0].text.partition(stop)[0]
    assert cut.choices[0].finish_reason == "stop"


def test_streamed_text_is_the_whole_text_and_usage_agrees(client):
    asked = {"model": "m", "messages": ASK, "max_tokens": 40, "seed": 3, "n": 2}
    whole = client.chat.completions.create(**asked)
    texts, finishes, usage = ["", ""], [None, None], None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finishes[choice.index] = choice.finish_reason or finishes[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert finishes == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage


def test_streamed_completion_is_the_whole_completion(client):
    asked = {"model": "m", "prompt": "What is", "max_tokens": 30, "seed": 3}
    whole = client.completions.create(**asked)
    pieces = list(client.completions.create(**asked, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_same_seed_gives_the_same_and_length_is_said(client):
    asked = {"model": "m", "prompt": ["What is", "Who is"], "max_tokens": 4, "n": 8, "seed": 11, "logprobs": 1}
    first, second = client.completions.create(**asked), client.completions.create(**asked)
    assert [c.index for c in first.choices] == list(range(16))
    assert [c.text for c in first.choices] == [c.text for c in second.choices]
    assert len({c.text for c in first.choices[:8]}) > 1
    for choice in first.choices:
        count = len(choice.logprobs.token_logprobs)
        assert choice.finish_reason == "stop" if count < 4 else count == 4
    assert first.usage.completion_tokens == sum(len(c.logprobs.token_logprobs) for c in first.choices)


BAD = {
    "no messages": ("/v1/chat/completions", {"messages": []}),
    "a role that is none": ("/v1/chat/completions", {"messages": [{"role": "judge", "content": "x"}]}),
    "content that is a number": ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}),
    "an image": ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    "tool calls that are words": ("/v1/chat/completions", {"messages": [{"role": "user", "tool_calls": ["x"]}]}),
    "a forced tool": ("/v1/chat/completions", {"messages": ASK, "tools": [{}], "tool_choice": "required"}),
    "temperature below 0": ("/v1/chat/completions", {"messages": ASK, "temperature": -1}),
    "n = 0": ("/v1/chat/completions", {"messages": ASK, "n": 0}),
    "n = 10000": ("/v1/chat/completions", {"messages": ASK, "n": 10_000}),
    "max_tokens = 0": ("/v1/completions", {"prompt": "a", "max_tokens": 0}),
    "what is not built": ("/v1/completions", {"prompt": "a", "echo": True}),
    "top logprobs": ("/v1/chat/completions", {"messages": ASK, "logprobs": True, "top_logprobs": 5}),
    "an empty prompt": ("/v1/completions", {"prompt": ""}),
    "no prompt": ("/v1/completions", {}),
    "ids outside of the vocabulary": ("/generate", {"input_ids": [10**6]}),
    "negative ids": ("/generate", {"input_ids": [-1]}),
    "a prompt beyond the context": ("/generate", {"input_ids": [5] * 5000}),
    "sampling_params that are a list": ("/generate", {"input_ids": [5], "sampling_params": [1]}),
    "too many prompts": ("/v1/completions", {"prompt": ["a"] * 2000}),
    "nobody's form": ("/generate", {"words": "hi"}),
    "prompt logprobs": ("/generate", {"prompt": "a", "prompt_logprobs": 3}),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_request_is_refused_in_openais_form(http, case):
    path, body = BAD[case]
    answer = http.post(path, json={"model": "m", **body})
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.json()["error"]["message"]


def test_bad_request_raises_the_clients_own_error(client):
    with pytest.raises(openai.UnprocessableEntityError, match="messages"):
        client.chat.completions.create(model="m", messages=[])


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_goes_away_cancels_its_sampling(model, http, stream):
    body = {"messages": ASK, "max_tokens": 1900, "ignore_eos": True, "n": 4, "stream": stream}
    if stream:
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(httpx.TimeoutException):
            http.post("/v1/chat/completions", json=body, timeout=0.3)
    until = time.monotonic() + 10
    engine = model.policy.engine
    while (engine.busy or engine.pool.free < engine.pool.pages) and time.monotonic() < until:
        time.sleep(0.05)
    assert not engine.busy
    assert engine.pool.free == engine.pool.pages
    assert http.get("/health").json()["status"] == "ok"


def test_new_weights_are_served_at_once(serve):
    model = load_completer("palestra/tiny")
    http = httpx.Client(base_url=serve(inference_app(model)), timeout=60)
    body = {"prompt": "What is", "max_tokens": 6, "temperature": 0}
    before = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    with torch.no_grad():
        torch.manual_seed(0)
        for weight in model.policy.engine.model.parameters():
            weight.add_(torch.randn_like(weight) * 0.3)
    model.policy.update(Weights(1, dict, model.policy.engine.model))
    after = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert after != before
    assert http.get("/health").json()["policy_version"] == 1
    body = {"text": "What is", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
    about = http.post("/generate", json=body).json()["meta_info"]
    assert (about["weight_version"], about["weight_versions"]) == ("1", [1, 1, 1])


def test_each_token_has_the_version_that_sampled_it():
    model = load_completer("palestra/tiny")

    async def main():
        params = SamplingParams(40, seed=1)  # without stop tokens it samples all 40
        running = asyncio.create_task(model.complete(SamplingRequest((5, 6, 7), 1, params)))
        while not (running.done() or model.policy.engine.busy):
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        model.policy.update(Weights(1, dict, model.policy.engine.model))
        return await running

    (completion,) = asyncio.run(main())
    assert len(completion.versions) == len(completion.token_ids) == 40
    assert set(completion.versions) == {0, 1}
    assert completion.versions == sorted(completion.versions)


def test_text_that_may_become_a_stop_or_a_call_is_held_back():
    assert certain("abc", ()) == "abc"
    assert certain("so <tool_ca", ("<tool_call>",)) == "so "
    assert certain("so <tool_call>{", ("<tool_call>",)) == "so "
    assert certain("a<b", ("<tool_call>",)) == "a<b"


def test_half_a_character_is_not_sent(tiny_tokenizer):
    ids = tiny_tokenizer("naïve → 😀 done", add_special_tokens=False)["input_ids"]
    stream = TextStream(tiny_tokenizer, ())
    pieces = [stream.push(ids[: i + 1]) for i in range(len(ids))]
    assert "".join(pieces) == tiny_tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)
