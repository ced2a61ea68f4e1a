"""Gateway workers: the same rollouts as without them, and what happens when a worker, a client or the trainer ends."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from processes import has_ended
from real_gateway import open_attempt, with_gateway
from scripted_model import END, QUESTION, TOOL, BranchingPolicy, ScriptedPolicy, completer

from palestra.core.errors import ContextLengthError, StateError
from palestra.core.types import Problem, SamplingParams, Turn
from palestra.servers.gateway.gateway import Gateway
from palestra.servers.gateway.workers import default_workers

FENCED = 'I add.\n```json\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n```'
TRAINER = """
import time
from palestra.servers.gateway.workers import GatewayWorker
print(GatewayWorker("127.0.0.1").process.pid, flush=True)
time.sleep(600)
"""


def said(text):
    return {"role": "user", "content": text}


async def ask(attempt, messages, **fields):
    """The answer's message, added to the messages."""
    headers = {"Authorization": f"Bearer {attempt.api_key}"}
    async with httpx.AsyncClient(base_url=attempt.base_url, headers=headers, timeout=60, trust_env=False) as client:
        answer = await client.post("/chat/completions", json={"model": "any", "messages": messages, **fields})
        answer.raise_for_status()
        messages.append(answer.json()["choices"][0]["message"])
        return messages[-1]


def with_own_worker(model, agent):
    async def run():
        gateway = Gateway(model, SamplingParams(max_new_tokens=200), workers=1)
        await gateway.start()
        try:
            return await agent(gateway)
        finally:
            await gateway.close()

    return asyncio.run(run())


def groups(model, workers):
    """The rollouts and counts of two siblings that ask several times, and branch."""

    async def agent(gateway):
        prompts = gateway.shared_prompts(2)
        siblings = [gateway.open(Problem("p", ""), seed_key=f"0/{i}", shared_prompts=prompts) for i in range(2)]

        async def play(attempt):
            messages = [said("What is 2 + 3?")]
            await ask(attempt, messages, tools=[TOOL])
            await ask(attempt, [*messages, said("And?")], tools=[TOOL], n=2)
            await ask(attempt, [*messages, said("And then?")], tools=[TOOL])
            return await attempt.finish()

        rollouts = [await play(attempt) for attempt in siblings]
        prompts.close()
        return rollouts, [attempt.counts for attempt in siblings]

    return with_gateway(model, agent, workers)


def test_the_same_seed_gives_the_same_rollouts_with_and_without_workers(model, gateway_workers):
    (mine, my_counts), (others, counts) = groups(model, gateway_workers), groups(model, None)
    assert my_counts == counts
    for a, b in zip(mine, others, strict=True):
        assert (a.turns, a.messages, a.stop, a.tool_names) == (b.turns, b.messages, b.stop, b.tool_names)
        assert [row.turns for row in a.lineages] == [row.turns for row in b.lineages]
    assert mine[0].turns != mine[1].turns
    assert len(mine[0].conversations) == 3


@pytest.mark.parametrize("kind", [ScriptedPolicy, BranchingPolicy])
def test_siblings_in_a_worker_share_a_prompt_and_branch_where_the_policy_can(tiny_tokenizer, gateway_workers, kind):
    computed = []
    for workers in (gateway_workers, None):
        model = completer(tiny_tokenizer, lambda i: f"One.{END}", kind=kind)
        (_, counts) = groups(model, workers)
        computed.append((model.policy.computed, counts))
        assert all(session.closed for session in model.policy.sessions)
    assert computed[0] == computed[1]


class Refusing(ScriptedPolicy):
    async def sample(self, session, params):
        raise ContextLengthError("the policy holds 7 tokens", 7, 9)


class Broken(ScriptedPolicy):
    async def sample(self, session, params):
        raise self.error


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_the_policy_arrives_with_its_code_before_a_stream_begins(tiny_tokenizer, gateway_workers, stream):
    async def agent(gateway):
        with pytest.raises(httpx.HTTPStatusError) as refused:
            await ask(open_attempt(gateway), [QUESTION], stream=stream)
        return refused.value.response

    answer = with_gateway(completer(tiny_tokenizer, [], kind=Refusing), agent, gateway_workers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_broken_policy_fails_the_attempt_with_its_own_error(tiny_tokenizer, gateway_workers):
    class OutOfMemory(Exception): ...

    model = completer(tiny_tokenizer, [], kind=Broken)
    model.policy.error = OutOfMemory("the GPU is full")

    async def agent(gateway):
        attempt = open_attempt(gateway)
        with pytest.raises(httpx.HTTPStatusError) as failed:
            await ask(attempt, [QUESTION])
        assert failed.value.response.status_code == 500
        with pytest.raises(OutOfMemory) as same:
            await attempt.finish()
        assert same.value is model.policy.error

    with_gateway(model, agent, gateway_workers)
    assert all(session.closed for session in model.policy.sessions)


class Gated(ScriptedPolicy):
    """Samples one token, and the rest after `go`."""

    def __init__(self, *values, **fields):
        super().__init__(*values, **fields)
        self.go, self.began, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def sample(self, session, params):
        ids = self.tokenizer.encode(f"One two three.{END}", add_special_tokens=False)
        session.token_ids.append(ids[0])
        self.began.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        session.token_ids += ids[1:]
        return Turn("model", ids, [-0.5] * len(ids), 0, "stop")


def test_a_stream_sends_tokens_while_the_turn_is_sampled(tiny_tokenizer, gateway_workers):
    model = completer(tiny_tokenizer, [], kind=Gated)

    async def agent(gateway):
        attempt, text = open_attempt(gateway), ""
        body = {"model": "m", "messages": [QUESTION], "stream": True}
        async with (
            httpx.AsyncClient(timeout=60, trust_env=False) as client,
            client.stream("POST", f"{attempt.base_url}/chat/completions", json=body) as answer,
        ):
            async for line in answer.aiter_lines():
                text += line
                if '"content": "O' in line:  # before the turn goes on
                    model.policy.go.set()
        assert "three" in text
        return await attempt.finish()

    rollout = with_gateway(model, agent, gateway_workers)
    assert rollout.messages[-1].text == "One two three."


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_cancels_the_sampling_in_the_trainer(tiny_tokenizer, gateway_workers, stream):
    model = completer(tiny_tokenizer, [], kind=Gated)

    async def agent(gateway):
        asking = asyncio.ensure_future(ask(open_attempt(gateway), [QUESTION], stream=stream))
        await model.policy.began.wait()
        asking.cancel()
        async with asyncio.timeout(60):
            await model.policy.cancelled.wait()
            while not all(session.closed for session in model.policy.sessions):
                await asyncio.sleep(0.01)

    with_gateway(model, agent, gateway_workers)


def test_the_settings_and_callbacks_of_the_completer_hold_in_workers(tiny_tokenizer, gateway_workers):
    tiny_tokenizer.chat_template = "{%- set mood = 'calm' %}" + tiny_tokenizer.chat_template + "{{ mood }}"
    model = completer(tiny_tokenizer, lambda i: FENCED + END)
    model.unexpected_calls = "error"
    asked = []
    model.on_request = lambda choices, params: asked.append((choices, params.max_new_tokens))

    async def agent(gateway):
        attempt = open_attempt(gateway)
        reply = await ask(attempt, [QUESTION], tools=[TOOL], n=2, max_tokens=90)
        with pytest.raises(StateError, match="finish"):
            _ = attempt.counts
        await attempt.finish()
        return reply, attempt.counts

    reply, counts = with_gateway(model, agent, gateway_workers)
    assert (reply["content"], counts.turns, asked) == (FENCED, 2, [(2, 90)])
    assert tiny_tokenizer.decode(model.policy.prompts[0]).endswith("calm")


def test_a_worker_that_is_killed_fails_its_attempts_with_the_reason(tiny_tokenizer):
    model = completer(tiny_tokenizer, [], kind=Gated)

    async def agent(gateway):
        attempt, other = open_attempt(gateway, 0), open_attempt(gateway, 1)
        asking = asyncio.ensure_future(ask(attempt, [QUESTION]))
        await model.policy.began.wait()
        os.kill(gateway.workers.process_ids[0], signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            await asking
        failed = [await attempt.finish(), await other.finish()]
        model.policy.go.set()
        local = open_attempt(gateway)
        await ask(local, [QUESTION])
        return failed, await local.finish()

    failed, rollout = with_own_worker(model, agent)
    for one in failed:
        assert (one.stop, one.turns) == ("failed", ())
        assert "SIGKILL" in one.error
    assert len(rollout.turns) == 2, "in this process, when no worker is left"
    assert all(session.closed for session in model.policy.sessions)


def test_half_of_the_processors_are_left_to_the_trainer_and_the_agents(monkeypatch):
    for count, expected in ((2, 0), (4, 1), (16, 7), (64, 8)):
        monkeypatch.setattr("palestra.servers.gateway.workers.processors", lambda count=count: count)
        assert default_workers() == expected


def test_a_worker_sees_no_keys_and_ends_with_its_trainer():
    environment = os.environ | {"SOME_API_KEY": "a secret of the trainer"}
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER], stdout=subprocess.PIPE, text=True, env=environment)
    worker = int(trainer.stdout.readline())
    assert b"SOME_API_KEY" not in Path(f"/proc/{worker}/environ").read_bytes()
    trainer.kill()
    trainer.communicate()
    assert has_ended(worker)
