"""The official anthropic client against gateways and `palestra serve`: whole and streamed messages, tools, errors."""

import json

import anthropic
import pytest
from real_gateway import open_attempt, with_attempt
from scripted_model import CALLS, END, QUESTION, SCHEMA, TOOL, completer

ADD = {"name": "add", "description": "Add.", "input_schema": TOOL["function"]["parameters"]}
FIELDS = {"model": "any", "max_tokens": 100}


def client_of(attempt, **options):
    given = {"base_url": attempt.anthropic_base_url, "api_key": attempt.api_key, "max_retries": 0}
    return anthropic.AsyncAnthropic(**{**given, **options})


def test_a_conversation_with_tools_is_one_row_of_the_very_tokens(tiny_tokenizer):
    async def agent(attempt):
        client = client_of(attempt)
        fields = {**FIELDS, "system": [{"type": "text", "text": "Add."}], "tools": [ADD]}
        first = await client.messages.create(messages=[QUESTION], **fields)
        assert first.stop_reason == "tool_use"
        assert [block.type for block in first.content] == ["text", "tool_use", "tool_use"]
        assert first.content[1].input == {"a": 2, "b": "é"}
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": block.name}]}
            for block in first.content[1:]
        ]
        said = {"role": "assistant", "content": [block.model_dump() for block in first.content]}
        history = [QUESTION, said, {"role": "user", "content": results}]
        counted = await client.messages.count_tokens(model="any", messages=history, system="Add.", tools=[ADD])
        second = await client.messages.create(messages=history, **fields)
        used = second.usage
        assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens
        assert used.cache_read_input_tokens == first.usage.input_tokens + first.usage.output_tokens
        assert (second.stop_reason, second.content[0].text) == ("end_turn", "It is 5.")
        return await attempt.finish(), attempt.counts

    model = completer(tiny_tokenizer, [CALLS, f"It is 5.{END}"])
    rollout, counts = with_attempt(model, agent)
    assert [t.token_ids.tolist() for t in rollout.turns if t.maker == "model"] == model.policy.sampled
    assert (counts.lineages, counts.recomputed_tokens, counts.retokenised_turns) == (1, 0, 0)
    assert [r.content for r in rollout.tool_results] == ["add", "other"]


@pytest.mark.parametrize("thinking", [{"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}])
def test_a_streamed_message_is_the_same_as_a_whole_one(tiny_tokenizer, thinking, with_server):
    async def agent(attempt):
        client = client_of(attempt)
        fields = {**FIELDS, "max_tokens": 2000, "messages": [QUESTION], "tools": [ADD], "thinking": thinking}
        whole = await client.messages.create(**fields)
        async with client.messages.stream(**fields) as stream:
            events = [event async for event in stream]
            return whole, events, await stream.get_final_message()

    whole, events, final = with_server(completer(tiny_tokenizer, [CALLS] * 2), agent)
    kinds = ["thinking"] * (thinking["type"] == "enabled") + ["text", "tool_use", "tool_use"]
    assert [block.type for block in whole.content] == [block.type for block in final.content] == kinds
    assert [b.input for b in whole.content[-2:]] == [b.input for b in final.content[-2:]] == [{"a": 2, "b": "é"}, {}]
    texts = [block.text.rstrip() for message in (whole, final) for block in message.content if block.type == "text"]
    assert texts == ["Let me see."] * 2
    assert (whole.stop_reason, whole.usage.output_tokens) == (final.stop_reason, final.usage.output_tokens)
    if thinking["type"] == "enabled":
        assert whole.content[0].thinking == final.content[0].thinking == "hm"
    starts = [event.index for event in events if event.type == "content_block_start"]
    assert starts == list(range(len(kinds)))
    assert events[-1].type == "message_stop"


def test_the_embedded_model_answers_by_schema_and_calls_when_it_must(model, with_server):
    async def agent(attempt):
        client = client_of(attempt)
        form = {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
        answer = await client.post("/v1/messages", body={**FIELDS, "messages": [QUESTION], **form}, cast_to=object)
        assert set(json.loads(answer["content"][0]["text"])) == {"x"}
        choice = {"type": "tool", "name": "add", "disable_parallel_tool_use": True}
        fields = {"model": "any", "max_tokens": 200, "messages": [QUESTION], "extra_body": {"temperature": 0}}
        fields |= {"tools": [ADD], "tool_choice": choice}
        async with client.messages.stream(**fields) as stream:
            final = await stream.get_final_message()
        assert [block.type for block in final.content] == ["tool_use"]
        assert final.content[0].name == "add"
        counted = await client.messages.count_tokens(model="any", messages=[QUESTION], tools=[ADD])
        assert counted.input_tokens == final.usage.input_tokens + final.usage.cache_read_input_tokens
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.create(**FIELDS, messages=[QUESTION, {"role": "assistant", "content": "It"}])
        assert refused.value.body["error"]["type"] == "invalid_request_error"

    with_server(model, agent)


def test_stop_sequences_and_limits_end_a_message(tiny_tokenizer, with_server):
    async def agent(attempt):
        client = client_of(attempt)
        stopped = await client.messages.create(**FIELDS, messages=[QUESTION], stop_sequences=[" two"])
        assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", " two", "One")
        cut = await client.messages.create(model="any", max_tokens=1, messages=[QUESTION])
        assert cut.stop_reason == "max_tokens"

    with_server(completer(tiny_tokenizer, ["One two"] * 2), agent)


def test_a_wrong_key_is_an_authentication_error_of_this_dialect(model, with_any_gateway):
    async def agent(gateway):
        one, other = open_attempt(gateway, 0), open_attempt(gateway, 1)
        for options in ({"api_key": other.api_key}, {"base_url": gateway.url, "api_key": "sk-ant-of-my-own"}):
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await client_of(one, **options).messages.create(**FIELDS, messages=[QUESTION])
            assert refused.value.body["error"]["type"] == "authentication_error"
        await client_of(one, base_url=gateway.url).messages.create(**FIELDS, messages=[QUESTION])
        assert [m.id async for m in client_of(one).models.list()] == ["palestra/tiny"]

    with_any_gateway(model, agent)
