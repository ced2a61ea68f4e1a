"""RemotePolicy and OpenAIChat against a server on this machine that gives prepared answers."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from palestra.core import http
from palestra.core.errors import RolloutError
from palestra.core.types import Message, SamplingParams
from palestra.policy.openai import OpenAIChat, OpenAISettings
from palestra.policy.remote import RemotePolicy

SAMPLED = {
    "text": "x",
    "meta_info": {
        "finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.5, 7, None]], "weight_version": "3",
    },
}  # fmt: skip


class Server:
    """Answers (status, JSON) in turn; without an answer left it keeps the client waiting until it hangs up."""

    def __init__(self, *answers: tuple[int, object]) -> None:
        self.answers = list(answers)
        self.requests: list[str] = []
        self.hung_up = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        async with await asyncio.start_server(self._serve, "127.0.0.1", 0) as server:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next((int(h.split(":")[1]) for h in head.splitlines() if h.startswith("content-length")), 0)
        self.requests.append(head + (await reader.readexactly(length)).decode())
        if self.answers:
            status, answer = self.answers.pop(0)
            body = json.dumps(answer).encode()
            writer.write(f"HTTP/1.1 {status} x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            await writer.drain()
        else:
            await reader.read()
            self.hung_up.set()
        writer.close()


@pytest.fixture
def short_pauses(monkeypatch):
    real = asyncio.sleep
    monkeypatch.setattr(http.asyncio, "sleep", lambda seconds: real(0.01))


def sample(server: Server, **options):
    async def run():
        async with server.running() as url:
            policy = RemotePolicy(f"{url}/v1", **options)
            session = policy.open([1, 2])
            return await policy.sample(session, SamplingParams(max_new_tokens=4)), session, policy

    return asyncio.run(run())


def test_trainer_that_stands_still_is_waited_for(short_pauses):
    server = Server((503, "in a step"), (429, "no room"), (200, SAMPLED))
    turn, session, policy = sample(server, token="t")
    assert (turn.token_ids.tolist(), session.token_ids, policy.version) == ([7], [1, 2, 7], 3)
    assert len(server.requests) == 3
    assert all("post /generate" in request and "bearer t" in request for request in server.requests)


def test_trainer_that_stays_away_fails_the_rollout_with_a_remedy():
    policy = RemotePolicy("http://127.0.0.1:9", give_up_s=0)
    with pytest.raises(RolloutError, match=r"127\.0\.0\.1:9/generate could not be asked: .*--serve-port"):
        asyncio.run(policy.sample(policy.open([1]), SamplingParams(max_new_tokens=4)))


def test_refused_conversation_fails_at_once():
    server = Server((400, "too long"), (200, SAMPLED))
    with pytest.raises(RolloutError, match=r"answered 400: .too long"):
        sample(server)
    assert len(server.requests) == 1


def test_cancelled_sampling_hangs_up():
    async def run() -> None:
        server = Server()
        async with server.running() as url:
            policy = RemotePolicy(url)
            task = asyncio.create_task(policy.sample(policy.open([1]), SamplingParams(max_new_tokens=4)))
            while not server.requests:
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait_for(server.hung_up.wait(), 10)

    asyncio.run(run())


def complete(server: Server):
    async def run():
        async with server.running() as url:
            chat = OpenAIChat(OpenAISettings(model_name="m", base_url=f"{url}/v1", api_key_env="MY_KEY"))
            return await chat.complete([Message("user", "2 + 2?")], [], SamplingParams(max_new_tokens=4))

    return asyncio.run(run())


def test_busy_endpoint_is_asked_again_with_the_key(short_pauses, monkeypatch):
    monkeypatch.setenv("MY_KEY", "sesame")
    answer = {"choices": [{"message": {"content": "4"}, "finish_reason": "length"}], "usage": {"completion_tokens": 1}}
    server = Server((500, ""), (200, answer))
    message, finish, tokens = complete(server)
    assert (message.text, finish, tokens) == ("4", "length", 1)
    assert all("bearer sesame" in request for request in server.requests)


def test_endpoint_that_fails_three_times_fails_the_rollout(short_pauses, monkeypatch):
    monkeypatch.delenv("MY_KEY", raising=False)
    server = Server(*[(500, "broken")] * 4)
    with pytest.raises(RolloutError, match=r"/v1/chat/completions answered 500: .broken"):
        complete(server)
    assert len(server.requests) == 3
    assert "authorization" not in server.requests[0]
