"""Agents on other machines: the token, and the addresses that they are given."""

import asyncio
import socket

import httpx
import pytest

from palestra.core.errors import NotAllowedError
from palestra.servers.gateway.gateway import Gateway
from palestra.servers.web import reachable_url
from palestra.sources.programs.outside import StandaloneGateway

TOKEN = "a-token-of-this-test"
ASK = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}


def test_the_token_takes_cases_and_an_attempts_key_does_the_rest_from_any_address(model, tmp_path):
    async def run():
        lone = StandaloneGateway(model, tmp_path / "rollouts.jsonl", token=TOKEN)
        await lone.gateway.start()
        bearer, elsewhere = {"Authorization": f"Bearer {TOKEN}"}, {"Host": "gpu-box:8005"}
        async with httpx.AsyncClient(base_url=lone.gateway.url, timeout=60, trust_env=False) as client:
            case = {"input": "hello"}
            without = await client.post("/attempts", json=case, headers=elsewhere)
            wrong = await client.post("/attempts", json=case, headers={"Authorization": "Bearer x"})
            taken = (await client.post("/attempts", json=case, headers={**bearer, **elsewhere})).json()
            own = {"Authorization": f"Bearer {taken['api_key']}", **elsewhere}
            path = f"/attempt/{taken['id']}/v1/chat/completions"
            said = await client.post(path, json=ASK, headers=own)
            by_key = await client.post("/v1/chat/completions", json=ASK, headers=own)
            by_token = await client.post("/v1/chat/completions", json=ASK, headers=bearer)
            ended = await client.post(f"/attempts/{taken['id']}/reward", json={"reward": 1}, headers=own)
        await lone.gateway.close()
        return taken, [answer.status_code for answer in (without, wrong, said, by_key, by_token, ended)]

    taken, statuses = asyncio.run(run())
    assert statuses == [401, 401, 200, 200, 401, 200]
    assert taken["base_url"] == f"http://gpu-box:8005/attempt/{taken['id']}/v1"
    assert taken["anthropic_base_url"] == f"http://gpu-box:8005/attempt/{taken['id']}"


def test_a_gateway_for_other_machines_needs_a_token(model):
    with pytest.raises(NotAllowedError, match="set a token"):
        Gateway(model, None, host="0.0.0.0")


def test_attempts_have_a_url_that_works_from_elsewhere():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert reachable_url("127.0.0.1", server) == f"http://127.0.0.1:{port}"
        assert reachable_url("gpu-box", server) == f"http://gpu-box:{port}"
        assert reachable_url("fd00::2", server) == f"http://[fd00::2]:{port}"
        own = reachable_url("0.0.0.0", server)
    assert own.endswith(f":{port}")
    assert "//0.0.0.0" not in own
