"""The inference server over the embedded model: every form, and what goes wrong."""

import asyncio
import threading

import httpx
import openai
import pytest
import torch
from builders import wait_until

from palestra.core.types import Message, SamplingParams
from palestra.core.weights import Weights
from palestra.models.chat.streaming import CertainText
from palestra.servers.openai.completer import Completer, SamplingRequest, TextStream
from palestra.servers.openai.inference import inference_app, load_completer

ASK = [{"role": "user", "content": "What is 3 + 4?"}]
QUESTION = Message("user", "What is 3 + 4?")


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
    single = http.post("/generate", json={"text": "What", "sampling_params": {"max_new_tokens": 2}}).json()
    assert "output_token_logprobs" not in single["meta_info"], "one object for one completion"
    several = http.post("/generate", json={"text": ["a", "b"], "sampling_params": {"max_new_tokens": 2}}).json()
    assert len(several) == 2


def test_vllm_form_is_told_apart_by_its_fields(model, http):
    ids = model.chat.prompt([QUESTION]).token_ids.tolist()
    body = {"prompt": {"prompt_token_ids": ids}, "logprobs": 0, "n": 2, "max_tokens": 5, "seed": 5}
    result = http.post("/generate", json=body).json()
    assert len(result["text"]) == len(result["finish_reasons"]) == len(result["logprobs"]) == 2
    first = direct(model, ids, max_new_tokens=5, seed=5)
    assert [int(next(iter(entry[0]))) for entry in result["logprobs"][0]] == first.token_ids.tolist()
    logprobs = [next(iter(entry[0].values())) for entry in result["logprobs"][0]]
    assert logprobs == pytest.approx(first.logprobs.tolist(), abs=1e-5)


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


def test_stop_string_ends_the_text_before_it_and_a_streamed_completion_is_the_whole_one(client):
    asked = {"model": "m", "prompt": "What is", "max_tokens": 12, "seed": 1, "temperature": 0}
    free = client.completions.create(**asked).choices[0]
    stop = free.text[3:5]
    cut = client.completions.create(**asked, stop=[stop]).choices[0]
    assert (cut.text, cut.finish_reason) == (free.text.partition(stop)[0], "stop")
    for whole, more in ((free, {}), (cut, {"stop": [stop]})):
        pieces = [piece.choices[0] for piece in client.completions.create(**asked, **more, stream=True)]
        assert "".join(piece.text for piece in pieces) == whole.text
        assert pieces[-1].finish_reason == whole.finish_reason


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


ECHOED = {"logprobs": 1, "echo": True}
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
    "what is not built": ("/v1/completions", {"prompt": "a", "suffix": "b"}),
    "top logprobs without logprobs": ("/v1/chat/completions", {"messages": ASK, "top_logprobs": 5}),
    "100 top logprobs": ("/v1/chat/completions", {"messages": ASK, "logprobs": True, "top_logprobs": 100}),
    "top logprobs of a part": ("/v1/completions", {"prompt": "a", "logprobs": 1, "top_p": 0.5}),
    "prompt logprobs at a temperature": ("/v1/completions", {"prompt": "a", **ECHOED, "temperature": 0.5}),
    "a user who says nothing": ("/v1/chat/completions", {"messages": [{"role": "user"}]}),
    "an assistant who says nothing": ("/v1/chat/completions", {"messages": [*ASK, {"role": "assistant"}]}),
    "an unknown field": ("/v1/chat/completions", {"messages": ASK, "temprature": 1}),
    "an unknown field of sampling_params": ("/generate", {"input_ids": [5], "sampling_params": {"temprature": 1}}),
    **{
        f"the template's variable {name}": (
            "/v1/chat/completions",
            {"messages": ASK, "chat_template_kwargs": {name: True}},
        )
        for name in ("enable_thinking", "tokenize")
    },
    "effort": ("/v1/chat/completions", {"messages": ASK, "reasoning_effort": "low"}),
    "a message to go on with": ("/v1/chat/completions", {"messages": ASK, "continue_final_message": True}),
    "no generation prompt": ("/v1/chat/completions", {"messages": ASK, "add_generation_prompt": False}),
    "prompt logprobs without logprobs": ("/generate", {"input_ids": [5], "logprob_start_len": 0}),
    "prompts x n": ("/generate", {"input_ids": [[5]] * 300, "sampling_params": {"n": 16}}),
    "a stop of 10,000 characters": ("/v1/completions", {"prompt": "a", "stop": "x" * 10_000}),
    "a stop id beyond int32": ("/generate", {"input_ids": [5], "sampling_params": {"stop_token_ids": [10**30]}}),
    "an empty prompt": ("/v1/completions", {"prompt": ""}),
    "no prompt": ("/v1/completions", {}),
    "ids outside of the vocabulary": ("/generate", {"input_ids": [10**6]}),
    "negative ids": ("/generate", {"input_ids": [-1]}),
    "a prompt beyond the context": ("/generate", {"input_ids": [5] * 5000}),
    "sampling_params that are a list": ("/generate", {"input_ids": [5], "sampling_params": [1]}),
    "too many prompts": ("/v1/completions", {"prompt": ["a"] * 2000}),
    "a form of no server": ("/generate", {"words": "hi"}),
    **{
        f"a grammar that is {text}": ("/v1/completions", {"prompt": "a", "max_tokens": 4, "grammar": text})
        for text in ("start: x", '{"x": 1}', "5", "[5]")
    },
    "prompt logprobs": ("/generate", {"prompt": "a", "prompt_logprobs": 3}),
}


MALFORMED = [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b'{"a": ' * 5000, b"[" * 100_000, b'{"a":' * 100_000]


def test_a_bad_request_is_refused_in_openais_form(http):
    for case, (path, body) in BAD.items():
        answer = http.post(path, json={"model": "m", **body})
        assert answer.status_code == 400, (case, answer.text)
        assert answer.json()["error"]["message"]
    for content in MALFORMED:
        for path in ("/v1/chat/completions", "/v1/completions", "/generate"):
            assert http.post(path, content=content).status_code == 400, content[:20]
    message = http.post("/v1/completions", json={"prompt": "a", "temprature": 1}).json()["error"]["message"]
    assert "Did you mean 'temperature'?" in message
    weights = http.post("/update_weights_from_disk", json={"model_path": "/etc/passwd"})
    assert (weights.status_code, "takes no weights" in weights.text) == (400, True), "unless it was started so"
    about = {"model": "m", "user": "me", "metadata": {}, "store": False, "n": None, "stream": None, "echo": None}
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **about}).status_code == 200


def reference(model, ids):
    """[T - 1, V] the logprobs of what may follow each token, by the model's own forward."""
    with torch.inference_mode():
        return model.policy.engine.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)


def test_echo_gives_the_prompts_own_logprobs_and_the_true_top(model, http):
    ids = model.encode("What is 3 + 4?")
    body = {"prompt": [list(ids), list(ids)], "max_tokens": 1, "logprobs": 2, "echo": True, "temperature": 0}
    first, second = http.post("/v1/completions", json=body).json()["choices"]
    assert first["text"].startswith("What is 3 + 4?")
    logprobs = first["logprobs"]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(ids) + 1
    expected = reference(model, [*ids, 0])
    for place, token in enumerate(ids[1:]):
        assert logprobs["token_logprobs"][place + 1] == pytest.approx(expected[place, token].item(), abs=1e-4)
        top = max(logprobs["top_logprobs"][place + 1].values())
        assert top == pytest.approx(expected[place].max().item(), abs=1e-4)
    assert second["logprobs"] == logprobs
    alone = http.post("/v1/completions", json={**body, "prompt": list(ids), "max_tokens": 0}).json()["choices"][0]
    assert alone["text"] == "What is 3 + 4?"
    assert alone["logprobs"]["token_logprobs"] == pytest.approx(logprobs["token_logprobs"][:-1], abs=1e-5)


def test_prompts_are_scored_alike_in_one_chunk_and_in_many(model, monkeypatch):
    ids = model.encode("What is 3 + 4? And what is 7 + 9, then?")

    def scored(chunk):
        monkeypatch.setattr("palestra.policy.local._CHUNK", chunk)
        pieces = list(model.score(ids, 3, top=2, temperature=1.0))
        return [p for piece in pieces for p in piece.logprobs], [t for piece in pieces for t in piece.top]

    (whole, top), (parts, top_of_parts) = scored(512), scored(2)
    assert len(whole) == len(ids) - 3
    assert parts == pytest.approx(whole, abs=1e-4)
    assert [[i for i, _ in pairs] for pairs in top] == [[i for i, _ in pairs] for pairs in top_of_parts]


def test_top_logprobs_of_a_sample_are_the_most_likely_tokens(client):
    asked = {"model": "m", "messages": ASK, "max_tokens": 6, "temperature": 1.0, "seed": 7, "logprobs": True}
    answer = client.chat.completions.create(**asked, top_logprobs=3)
    rows = answer.choices[0].logprobs.content
    assert all(len(row.top_logprobs) == 3 for row in rows)
    assert all(max(t.logprob for t in row.top_logprobs) >= row.logprob - 1e-4 for row in rows)
    same = [t.logprob for row in rows for t in row.top_logprobs if t.token == row.token]
    assert same
    (choice,) = [
        c for p in client.chat.completions.create(**asked, top_logprobs=3, stream=True) for c in p.choices if c.logprobs
    ]
    assert choice.logprobs.content == rows


def test_sglang_form_gives_the_prompts_logprobs_from_the_token_asked_for(model, http):
    ids = list(model.encode("What is 3 + 4?"))
    asked = {"input_ids": [ids, ids[:4]], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    asked |= {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    first, second = (row["meta_info"] for row in http.post("/generate", json=asked).json())
    assert [row[1] for row in first["input_token_logprobs"]] == ids
    assert first["input_token_logprobs"][0][0] is first["input_top_logprobs"][0] is None
    assert second["input_token_logprobs"][1] == pytest.approx(first["input_token_logprobs"][1], abs=1e-4)
    assert len(first["output_top_logprobs"]) == 1
    later = http.post("/generate", json=asked | {"input_ids": ids, "logprob_start_len": 3}).json()["meta_info"]
    assert [row[1] for row in later["input_token_logprobs"]] == ids[3:]


def test_token_ids_are_returned_on_request(model, http):
    chat = http.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 3, "return_token_ids": True}).json()
    assert chat["prompt_token_ids"] == model.chat.prompt([QUESTION]).token_ids.tolist()
    assert len(chat["choices"][0]["token_ids"]) == chat["usage"]["completion_tokens"]
    text = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, "return_token_ids": True}).json()
    assert text["choices"][0]["prompt_token_ids"] == list(model.encode("a"))


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(model, http, monkeypatch):
    """30 MB of text took 100 s and 7 GB, and nobody else was answered."""
    for each in (model, model.twin):
        assert each.max_characters < 100_000
        monkeypatch.setattr(each, "tokenizer", None)
    text = "hello world " * 500_000
    chat = {"messages": [{"role": "user", "content": text}]}
    for path, body in {"/generate": {"text": text}, "/v1/completions": {"prompt": text}}.items():
        answer = http.post(path, json=body)
        assert (answer.status_code, "characters" in answer.text) == (400, True)
    assert http.post("/v1/chat/completions", json=chat).json()["error"]["code"] == "context_length_exceeded"
    assert http.post("/generate", content=b" " * (17 << 20)).status_code == 413


def test_the_tokens_of_all_prompts_times_n_are_bounded(http, monkeypatch):
    monkeypatch.setattr("palestra.servers.openai.completer._MAX_TOKENS", 15)
    body = {"input_ids": [[5] * 4] * 2, "sampling_params": {"n": 2, "max_new_tokens": 1}}
    answer = http.post("/generate", json=body)
    assert (answer.status_code, "16 tokens x n together" in answer.text) == (400, True)


def test_a_large_body_is_prepared_in_a_thread_with_the_same_result(http, monkeypatch):
    threads, prepare = [], Completer.check_total

    def noted(self, tokens):
        threads.append(threading.current_thread().name)
        return prepare(self, tokens)

    monkeypatch.setattr(Completer, "check_total", noted)
    body = {"prompt": "What is 3 + 4?", "max_tokens": 4, "temperature": 0}
    small = http.post("/v1/completions", json=body).json()["choices"]
    monkeypatch.setattr("palestra.servers.openai.completer.MAX_INLINE_CHARS", 10)
    assert http.post("/v1/completions", json=body).json()["choices"] == small
    assert http.post("/v1/completions", json=body | {"temprature": 1}).status_code == 400
    assert [name.startswith("palestra-tokenise") for name in threads] == [False, True]


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_goes_away_cancels_its_sampling(model, http, stream):
    body = {"messages": ASK, "max_tokens": 1900, "ignore_eos": True, "n": 4, "stream": stream}
    if stream:
        with http.stream("POST", "/v1/chat/completions", json=body) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(httpx.TimeoutException):
            http.post("/v1/chat/completions", json=body, timeout=0.3)
    engine = model.policy.engine
    wait_until(lambda: not engine.busy)
    # KV pages are held for closed conversations only
    wait_until(lambda: engine.scheduler.holders.keys() == engine.scheduler.kept.keys())
    assert http.get("/health").json()["status"] == "ok"


def test_new_weights_are_served_at_once_and_each_token_has_the_version_that_sampled_it(serve):
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

    async def main():
        params = SamplingParams(40, seed=1)  # without stop tokens it samples all 40
        running = asyncio.create_task(model.complete(SamplingRequest((5, 6, 7), 1, params)))
        while not (running.done() or model.policy.engine.busy):
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        model.policy.update(Weights(2, dict, model.policy.engine.model))
        return await running

    (completion,) = asyncio.run(main())
    assert len(completion.versions) == len(completion.token_ids) == 40
    assert set(completion.versions) == {1, 2}
    assert completion.versions == sorted(completion.versions)


def test_text_that_may_become_a_stop_or_a_call_and_half_a_character_are_held_back(tiny_tokenizer):
    assert CertainText(()).push("abc") == "abc"
    assert CertainText(("<tool_call>",)).push("so <tool_ca") == "so "
    assert CertainText(("<tool_call>",)).push("so <tool_call>{") == "so "
    assert CertainText(("<tool_call>",)).push("a<b") == "a<b"
    ids = tiny_tokenizer("naïve → 😀 done", add_special_tokens=False)["input_ids"]
    stream = TextStream(tiny_tokenizer, ())
    pieces = [stream.push(ids[: i + 1]) for i in range(len(ids))]
    assert "".join(pieces) == tiny_tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)
