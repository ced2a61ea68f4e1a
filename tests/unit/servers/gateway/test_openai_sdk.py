"""The official openai client against gateways and `palestra serve`: both dialects, whole and streamed, and errors."""

import asyncio
import json

import openai
import pytest
from real_gateway import open_attempt, with_attempt, with_serve
from scripted_model import CALLS, END, QUESTION, SCHEMA, TOOL, completer

FLAT_TOOL = {"type": "function", "strict": True, **TOOL["function"]}


def client_of(attempt):
    return openai.AsyncOpenAI(base_url=attempt.base_url, api_key=attempt.api_key, max_retries=0)


async def collected(stream):
    return [event async for event in stream]


def test_an_attempt_is_found_by_its_url_or_its_key_and_no_key_opens_another(model, with_any_gateway):
    async def agent(gateway):
        one, other = open_attempt(gateway, 0), open_attempt(gateway, 1)

        async def ask(base_url, api_key):
            async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
                return await client.chat.completions.create(model="any", messages=[QUESTION], max_tokens=3)

        await ask(one.base_url, one.api_key)
        await ask(f"{gateway.url}/v1", one.api_key)
        await ask(one.base_url, "sk-of-my-own")
        for base_url, key in [(one.base_url, other.api_key), (f"{gateway.url}/v1", "sk-of-my-own")]:
            with pytest.raises(openai.AuthenticationError):
                await ask(base_url, key)
        assert len((await one.finish()).conversations) == one.counts.requests == 3
        for base_url in (one.base_url, f"{gateway.url}/v1"):
            with pytest.raises(openai.AuthenticationError, match="has ended"):
                await ask(base_url, one.api_key)
        await ask(other.base_url, other.api_key)
        await other.finish()
        assert other.counts.requests == 1

    with_any_gateway(model, agent)


def test_a_streamed_chat_is_the_same_as_a_whole_one(model, with_server):
    """By the same seed, with a tool call that is required."""
    fields = {"model": "any", "messages": [QUESTION], "tools": [TOOL], "tool_choice": "required", "logprobs": True}
    fields |= {"seed": 1, "max_tokens": 200}

    async def whole(attempt):
        return (await client_of(attempt).chat.completions.create(**fields)).choices[0]

    async def streamed(attempt):
        client = client_of(attempt)
        async with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
            events = await collected(stream)
            return events, (await stream.get_final_completion())

    choice = with_server(model, whole)
    events, final = with_server(model, streamed)
    (called,) = {c.function.name for c in choice.message.tool_calls}
    assert called == "add"
    assert choice.finish_reason == final.choices[0].finish_reason == "tool_calls"
    arguments = [[c.function.arguments for c in m.message.tool_calls] for m in (choice, final.choices[0])]
    assert arguments[0] == arguments[1]
    assert [t.logprob for t in choice.logprobs.content] == [t.logprob for t in final.choices[0].logprobs.content]
    assert final.usage.completion_tokens == len(choice.logprobs.content)
    assert any(event.type == "tool_calls.function.arguments.done" for event in events)


def test_chat_answers_have_text_thinking_and_parallel_calls_apart(tiny_tokenizer, with_server):
    async def agent(attempt):
        client = client_of(attempt)
        fields = {"model": "any", "messages": [QUESTION], "tools": [TOOL]}
        whole = (await client.chat.completions.create(**fields)).choices[0].message
        chunks = await collected(await client.chat.completions.create(**fields, stream=True))
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert whole.content == "".join(d.content or "" for d in deltas).rstrip() == "Let me see."
        assert whole.reasoning_content == "".join(getattr(d, "reasoning_content", "") for d in deltas) == "hm"
        calls = [c for d in deltas for c in d.tool_calls or ()]
        assert [c.function.name for c in whole.tool_calls] == [c.function.name for c in calls] == ["add", "other"]
        assert json.loads(whole.tool_calls[0].function.arguments) == {"a": 2, "b": "é"}
        assert len({c.id for c in [*whole.tool_calls, *calls]}) == 4

    with_server(completer(tiny_tokenizer, [CALLS] * 2), agent)


def test_stop_sequences_limits_and_choices(model, tiny_tokenizer, with_server):
    async def agent(attempt):
        create = client_of(attempt).chat.completions.create
        short = await create(
            model="any", messages=[QUESTION], max_completion_tokens=2, n=3, top_logprobs=2, logprobs=True
        )
        assert [c.finish_reason for c in short.choices] == ["length"] * 3
        assert all(len(t.top_logprobs) == 2 for c in short.choices for t in c.logprobs.content)
        assert short.usage.completion_tokens == 6

    with_server(model, agent)

    async def stops(attempt):
        create = client_of(attempt).chat.completions.create
        fields = {"model": "any", "messages": [QUESTION], "stop": [" two"]}
        whole = (await create(**fields)).choices[0]
        chunks = await collected(await create(**fields, stream=True))
        assert whole.message.content == "".join(c.choices[0].delta.content or "" for c in chunks) == "One"
        assert whole.finish_reason == chunks[-1].choices[0].finish_reason == "stop"

    with_server(completer(tiny_tokenizer, ["One two"] * 2), stops)


def test_answers_keep_to_a_json_schema_or_a_named_tool_and_the_models_can_be_asked_for(model, with_server):
    async def agent(attempt):
        client = client_of(attempt)
        schema = {"name": "number", "schema": SCHEMA, "strict": True}
        fields = {"model": "any", "max_tokens": 100}
        chat = await client.chat.completions.create(
            messages=[QUESTION], response_format={"type": "json_schema", "json_schema": schema}, **fields
        )
        response = await client.responses.create(
            model="any", input="What is 2 + 3?", text={"format": {"type": "json_schema", **schema}}
        )
        for text in (chat.choices[0].message.content, response.output_text):
            assert set(json.loads(text)) == {"x"}
        any_object = await client.chat.completions.create(
            messages=[QUESTION], response_format={"type": "json_object"}, model="any", max_tokens=5
        )
        assert any_object.choices[0].message.content.lstrip().startswith("{")
        assert [m.id async for m in client.models.list()] == ["palestra/tiny"]
        assert (await client.models.retrieve("gpt-5")).id == "gpt-5"
        chosen = {"tool_choice": {"type": "function", "function": {"name": "add"}}, "parallel_tool_calls": False}
        fields = {"model": "any", "messages": [QUESTION], "tools": [TOOL], "temperature": 0, **chosen}
        answer = await client.chat.completions.create(**fields)
        assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["add"], "once"

    with_server(model, agent)


def test_serve_answers_each_request_on_its_own(model):
    async def agent(address):
        client = client_of(address)
        fields = {"model": "any", "messages": [QUESTION], "max_tokens": 30}
        one, other = [await client.chat.completions.create(**fields, seed=5, n=4) for _ in range(2)]
        texts = [choice.message.content for choice in one.choices]
        assert texts == [choice.message.content for choice in other.choices]
        assert len(set(texts)) > 1
        free = [await client.chat.completions.create(**fields) for _ in range(4)]
        assert len({answer.choices[0].message.content for answer in free}) > 1

    with_serve(model, agent)
    assert not model.policy.engine.busy


def test_serve_stores_responses_until_they_are_too_many(tiny_tokenizer, monkeypatch):
    async def agent(address):
        create = client_of(address).responses.create
        first = await create(model="any", input="What is 2 + 3?", tools=[FLAT_TOOL])
        calls = [item.call_id for item in first.output if item.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": call, "output": "5"} for call in calls]
        second = await create(model="any", input=results, previous_response_id=first.id, tools=[FLAT_TOOL])
        assert (second.output_text, len(set(calls))) == ("It is 5.", 2)
        assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
        monkeypatch.setattr("palestra.servers.gateway.responses._MAX_STORED", 500)
        await create(model="any", input="Hi.")
        with pytest.raises(openai.BadRequestError, match="no response that is stored"):
            await create(model="any", input="And?", previous_response_id=first.id)

    with_serve(completer(tiny_tokenizer, [CALLS, f"It is 5.{END}", f"Hi.{END}"]), agent)


def test_a_conversation_of_responses_is_one_row_by_history_and_by_id(tiny_tokenizer):
    """The whole history sent again, or the id of the response before: both go on from the very tokens."""
    script = [CALLS, f"It is 5.{END}", f"Bye.{END}"]

    async def agent(attempt):
        create = client_of(attempt).responses.create
        fields = {"model": "any", "tools": [FLAT_TOOL], "instructions": "Add."}
        first = await create(input="What is 2 + 3?", **fields)
        calls = [item for item in first.output if item.type == "function_call"]
        assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
        results = [{"type": "function_call_output", "call_id": c.call_id, "output": c.name} for c in calls]
        history = [QUESTION, *(item.model_dump() for item in first.output), *results]
        second = await create(input=history, **fields)
        assert second.output_text == "It is 5."
        assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens
        third = await create(input="Thanks.", previous_response_id=second.id, **fields)
        assert third.previous_response_id == second.id
        with pytest.raises(openai.BadRequestError, match="is no response that is stored"):
            await create(input="Thanks.", previous_response_id="resp_other", **fields)
        return await attempt.finish(), attempt.counts

    model = completer(tiny_tokenizer, script)
    rollout, counts = with_attempt(model, agent)
    assert [t.token_ids.tolist() for t in rollout.turns if t.maker == "model"] == model.policy.sampled
    assert (counts.lineages, counts.recomputed_tokens, counts.retokenised_turns) == (1, 0, 0)


def test_a_streamed_response_has_all_events_of_its_items(tiny_tokenizer, with_server):
    async def agent(attempt):
        client = client_of(attempt)
        async with client.responses.stream(model="any", input="What is 2 + 3?", tools=[FLAT_TOOL]) as stream:
            events = await collected(stream)
            return events, await stream.get_final_response()

    events, final = with_server(completer(tiny_tokenizer, [CALLS]), agent)
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta").rstrip() == "Let me see."
    done = [e.arguments for e in events if e.type == "response.function_call_arguments.done"]
    assert done == [item.arguments for item in final.output if item.type == "function_call"]
    assert final.status == "completed"
    assert final.output_text == "Let me see."
    assert {e.type for e in events} >= {"response.created", "response.output_item.added", "response.completed"}


def test_an_attempt_that_ends_in_mid_turn_ends_the_requests_of_its_agent(model, with_any_gateway):
    async def agent(gateway):
        attempt = open_attempt(gateway)
        client = client_of(attempt)
        fields = {"model": "any", "messages": [QUESTION], "extra_body": {"ignore_eos": True}}
        whole = asyncio.ensure_future(client.chat.completions.create(**fields))
        stream = await client.chat.completions.create(**fields, stream=True)
        await anext(stream)
        while len(model.policy._waiters) != 2:
            await asyncio.sleep(0.01)
        assert (await attempt.finish()).turns == ()
        with pytest.raises(openai.APIStatusError, match="has ended"):
            await whole
        with pytest.raises(openai.APIError, match="has ended"):
            await collected(stream)

    with_any_gateway(model, agent)
    assert not model.policy.engine.busy


def test_calls_from_twenty_threads_are_conversations_of_their_own(tiny_tokenizer, with_any_gateway):
    def talk(attempt, i):
        with openai.OpenAI(base_url=attempt.base_url, api_key=attempt.api_key, max_retries=0) as client:
            messages = [{"role": "user", "content": f"Question {i % 10}?"}]
            for _ in range(2):
                answer = client.chat.completions.create(model="any", messages=messages).choices[0].message
                messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "And?"}]

    async def agent(gateway):
        attempt = open_attempt(gateway)
        await asyncio.gather(*(asyncio.to_thread(talk, attempt, i) for i in range(20)))
        return await attempt.finish(), attempt.counts

    model = completer(tiny_tokenizer, lambda i: f"{i}.{END}")
    rollout, counts = with_any_gateway(model, agent)
    rows = rollout.conversations
    trained = [t.token_ids.tolist() for row in rows for t in row.turns if t.maker == "model"]
    assert sorted(trained) == sorted(model.policy.sampled)
    assert (len(rows), counts.turns, counts.recomputed_tokens, counts.retokenised_turns) == (20, 40, 0, 0)
