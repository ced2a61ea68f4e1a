"""The gateway without a training: attempts are opened and ended over HTTP, and their rollouts are lines of a file."""

import asyncio
import json

import httpx
import pytest
from builders import END, ScriptedPolicy

from palestra.core.group_codec import rollout_from_dict
from palestra.core.types import Problem
from palestra.servers.openai.completer import Completer
from palestra.sources.programs import outside
from palestra.sources.programs.outside import StandaloneGateway


def test_open_attempts_are_bounded_and_one_that_ends_makes_room(model, tmp_path, monkeypatch):
    monkeypatch.setattr(outside, "MAX_OPEN", 2)

    async def run():
        lone = StandaloneGateway(model, tmp_path / "rollouts.jsonl")
        await lone.gateway.start()
        async with httpx.AsyncClient(base_url=lone.gateway.url, timeout=60) as client:
            first, *others = [await client.post("/attempts", json={"input": "hello"}) for _ in range(4)]
            key = {"Authorization": f"Bearer {first.json()['api_key']}"}
            await client.post(f"/attempts/{first.json()['id']}/reward", json={"reward": 1}, headers=key)
            again = await client.post("/attempts", json={"input": "hello"})
        await lone.gateway.close()
        return [answer.status_code for answer in (first, *others, again)], others[-1].json()["error"]["message"]

    statuses, message = asyncio.run(run())
    assert statuses == [200, 200, 429, 429, 200]
    assert message.startswith("2 attempts")


def test_an_attempt_is_opened_ended_and_written_down_with_its_very_tokens(model, tmp_path):
    file = tmp_path / "rollouts.jsonl"

    async def run():
        lone = StandaloneGateway(model, file, cases=[Problem("case-0", "What does a red lamp cost?")])
        await lone.gateway.start()
        async with httpx.AsyncClient(base_url=lone.gateway.url, timeout=60) as client:
            own = (await client.post("/attempts", json={"input": "hello", "id": "mine"})).json()
            next_case = (await client.post("/attempts")).json()
            none_left = await client.post("/attempts")
            key = {"Authorization": f"Bearer {own['api_key']}"}
            body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
            said = await client.post(f"{own['base_url']}/chat/completions", json=body, headers=key)
            wrong = await client.post(f"/attempts/{next_case['id']}/reward", json={"reward": 1}, headers=key)
            ended = await client.post(f"/attempts/{own['id']}/reward", json={"reward": 0.5}, headers=key)
            after = await client.post(f"{own['base_url']}/chat/completions", json=body, headers=key)
        await lone.gateway.close()
        return next_case, none_left, said, wrong, ended, after

    next_case, none_left, said, wrong, ended, after = asyncio.run(run())
    assert next_case["case"]["id"] == "case-0"
    assert none_left.status_code == 404
    assert said.status_code == 200
    assert (wrong.status_code, after.status_code) == (401, 401)
    assert ended.json()["rows"] == 1
    (line,) = file.read_text().splitlines()
    rollout = rollout_from_dict(json.loads(line))
    assert (rollout.problem_id, rollout.reward) == ("mine", 0.5)
    assert rollout.sampled_tokens == 4


def test_of_two_rewards_posted_at_once_the_second_is_refused(model, tmp_path):
    file = tmp_path / "rollouts.jsonl"

    async def run():
        lone = StandaloneGateway(model, file)
        await lone.gateway.start()
        begun, first_is_there = asyncio.Event(), asyncio.Event()

        async def slow_body():
            yield b'{"reward": '
            begun.set()
            await first_is_there.wait()
            yield b"1}"

        async with httpx.AsyncClient(base_url=lone.gateway.url, timeout=60) as client:
            attempt = (await client.post("/attempts", json={"input": "hello"})).json()
            url, key = f"/attempts/{attempt['id']}/reward", {"Authorization": f"Bearer {attempt['api_key']}"}
            slow = asyncio.create_task(client.post(url, content=slow_body(), headers=key))
            await begun.wait()
            first = await client.post(url, json={"reward": 0.5}, headers=key)
            first_is_there.set()
            second = await slow
            late = await client.post(url, json={"reward": 1}, headers=key)
        await lone.gateway.close()
        return first, second, late

    first, second, late = asyncio.run(run())
    assert (first.status_code, second.status_code, late.status_code) == (200, 401, 401)
    assert "has ended" in second.json()["error"]["message"]
    (line,) = file.read_text().splitlines()
    assert rollout_from_dict(json.loads(line)).reward == 0.5


HALF = "\ud83d lamp"
CALLS = '<tool_call>\n{"name": "stock\\ud83d", "arguments": {"item\\ude00": "\\ud83d lamp"}}\n</tool_call>' + END
WRITTEN = '{"item\\ud83d": ["\\ud83d lamp"]}'  # by an agent, where a call's arguments are text
PARAMETERS = {"type": "object", "properties": {HALF: {"type": "string", "description": HALF}}}
OPENAI_TOOL = {"type": "function", "function": {"name": "stock\ud83d", "description": HALF, "parameters": PARAMETERS}}


def chat_turn(said):
    call = {"id": "c\ud83d", "type": "function", "function": {"name": HALF, "arguments": WRITTEN}}
    reply = said["choices"][0]["message"] if said else {"role": "assistant", "content": HALF, "tool_calls": [call]}
    results = [{"role": "tool", "tool_call_id": each["id"], "content": HALF} for each in reply["tool_calls"]]
    return "/v1/chat/completions", {"tools": [OPENAI_TOOL]}, "messages", [reply, *results]


def responses_turn(said):
    call = {"type": "function_call", "call_id": "c\ud83d", "name": HALF, "arguments": WRITTEN}
    calls = [item for item in said["output"] if item["type"] == "function_call"] if said else [call]
    history = [*calls, *({"type": "function_call_output", "call_id": c["call_id"], "output": HALF} for c in calls)]
    return "/v1/responses", {"tools": [OPENAI_TOOL["function"] | {"type": "function"}]}, "input", history


def messages_turn(said):
    call = {"type": "tool_use", "id": "c\ud83d", "name": HALF, "input": {HALF: [HALF]}}
    calls = [block for block in said["content"] if block["type"] == "tool_use"] if said else [call]
    results = [{"type": "tool_result", "tool_use_id": c["id"], "content": HALF} for c in calls]
    history = [{"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    tool = {"name": "stock\ud83d", "description": HALF, "input_schema": PARAMETERS}
    return "/v1/messages", {"tools": [tool], "max_tokens": 100}, "messages", history


@pytest.mark.parametrize("turn", [chat_turn, responses_turn, messages_turn])
@pytest.mark.parametrize("by_agent", [False, True], ids=["by the model", "by the agent"])
def test_half_an_emoji_in_any_dialect_is_answered_and_recorded(turn, by_agent, tiny_tokenizer, tmp_path):
    file = tmp_path / "rollouts.jsonl"
    model = Completer(ScriptedPolicy(tiny_tokenizer, lambda i: CALLS), tiny_tokenizer, "scripted", 10_000)

    async def run():
        lone = StandaloneGateway(model, file)
        await lone.gateway.start()
        async with httpx.AsyncClient(base_url=lone.gateway.url, timeout=60) as client:

            async def post(path, body):
                key = {"Authorization": f"Bearer {opened['api_key']}"} if path != "/attempts" else {}
                answer = await client.post(path, content=json.dumps(body), headers=key)  # with escapes, as most clients
                assert answer.status_code == 200, (path, answer.text)
                return answer.json()

            opened = await post("/attempts", {"input": HALF, "id": HALF})
            history, said = [{"role": "user", "content": HALF}], None
            for _ in range(3):
                path, fields, key, more = turn(said)
                history += more if said or by_agent else []
                path = f"/attempt/{opened['id']}{path}"
                said = await post(path, {"model": "m", key: history, **fields})
            await post(f"/attempts/{opened['id']}/reward", {"reward": 0.5, "error": HALF})
        await lone.gateway.close()

    asyncio.run(run())
    (line,) = file.read_text(encoding="utf-8").splitlines()
    rollout = rollout_from_dict(json.loads(line))
    assert (rollout.problem_id, rollout.reward, rollout.error) == ("? lamp", 0.5, "? lamp")
    assert rollout.tool_names == ("stock?",)
    calls = [call for message in rollout.messages for call in message.tool_calls]
    assert (calls[-1].name, calls[-1].arguments) == ("stock?", {"item?": "? lamp"})
    assert not rollout.lineages  # what the agent sends back is recognised as the model's own
