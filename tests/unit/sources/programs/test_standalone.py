"""The gateway without a training: attempts are opened and ended over HTTP, and their rollouts are lines of a file."""

import asyncio
import json

import httpx

from palestra.core.group_codec import rollout_from_dict
from palestra.core.types import Problem
from palestra.sources.programs import standalone
from palestra.sources.programs.standalone import StandaloneGateway


def test_open_attempts_are_bounded_and_one_that_ends_makes_room(model, tmp_path, monkeypatch):
    monkeypatch.setattr(standalone, "MAX_OPEN", 2)

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
