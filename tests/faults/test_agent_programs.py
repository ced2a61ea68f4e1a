"""Agents that die, hang, flood, call from many threads or never call: groups complete, with the failure on record."""

import asyncio
import sys
import time

import pytest

from palestra import EvalSuite
from palestra.agents.agent import Agent
from palestra.agents.programs import ProgramLimits, command_agent
from palestra.core.types import SamplingParams
from palestra.envs.suite_env import SuiteEnvironment
from palestra.rollout.collect import Collector
from palestra.servers.gateway.gateway import Gateway
from palestra.servers.openai.inference import load_completer
from palestra.sources.programs.runner import ProgramRunner
from palestra.train.batch import to_batch

# Standard library alone, so that it starts in milliseconds. What goes wrong is named by the case.
PROGRAM = """
import json, os, socket, sys, threading, time
case = json.load(sys.stdin)
host, port = os.environ["OPENAI_BASE_URL"].split("/")[2].split(":")
path = os.environ["OPENAI_BASE_URL"].split(port, 1)[1] + "/chat/completions"

def send(text):
    body = json.dumps({"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": text}]}).encode()
    connection = socket.create_connection((host, int(port)))
    head = f"POST {path} HTTP/1.1\\r\\nHost: {host}:{port}\\r\\nX-Api-Key: {os.environ['OPENAI_API_KEY']}\\r\\n"
    head += "Content-Type: application/json\\r\\n"
    head += f"Content-Length: {len(body)}\\r\\nConnection: close\\r\\n\\r\\n"
    connection.sendall(head.encode() + body)
    return connection

def ask(text):
    answer = b""
    connection = send(text)
    while chunk := connection.recv(65536):
        answer += chunk
    assert answer.split()[1] == b"200", answer
    return json.loads(answer.split(b"\\r\\n\\r\\n", 1)[1])["choices"][0]["message"]["content"]

fault = case["input"]
if fault == "killed in mid-turn":
    ask("hello")
    send("and then?")
    os.kill(os.getpid(), 9)
elif fault == "hangs":
    ask("hello")
    print("still here", flush=True)
    time.sleep(600)
elif fault == "floods":
    ask("hello")
    while True:
        print("x" * 10_000)
elif fault == "20 threads":
    threads = [threading.Thread(target=ask, args=(f"part {i}",)) for i in range(20)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
elif fault == "never calls":
    sys.exit("I have no idea")
else:
    print(ask("hello"))
"""
FAULTS = ["killed in mid-turn", "hangs", "floods", "20 threads", "never calls", "nothing"]
TIMEOUT_S = 8.0


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """One group of two attempts for each fault, all at once."""
    file = tmp_path_factory.mktemp("agent") / "agent.py"
    file.write_text(PROGRAM)
    agent = command_agent([sys.executable, "-IS", str(file)])
    suite = EvalSuite.from_records([{"input": fault} for fault in FAULTS], measures=[lambda ctx: 0.5])
    environment = SuiteEnvironment(Agent("a", "palestra/tiny"), suite)
    model = load_completer("palestra/tiny")
    sampling = SamplingParams(max_new_tokens=64)

    async def collect():
        gateway = Gateway(model, sampling)
        limits = ProgramLimits(TIMEOUT_S, max_output_bytes=100_000)
        runner = ProgramRunner(environment, agent, gateway, sampling, limits, asyncio.Semaphore(12))
        collector = Collector(environment, runner, max_open_episodes=12)
        await gateway.start()
        began = time.monotonic()
        try:
            keys = [f"0/{i}" for i in range(len(FAULTS))]
            found = await collector.collect(environment.problems("train"), 2, keys)
            return found, time.monotonic() - began
        finally:
            await gateway.close()

    found, seconds = asyncio.run(collect())
    return dict(zip(FAULTS, found, strict=True)), seconds


def test_no_fault_holds_up_the_groups_beyond_the_time_out(groups):
    found, seconds = groups
    assert seconds < TIMEOUT_S + 30
    assert all(len(group.rollouts) == 2 for group in found.values())


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("killed in mid-turn", "ended by signal 9"),
        ("hangs", "longer than 8 s (agent.timeout_s) and was ended; its last line was: still here"),
        ("floods", "more than 100000 bytes (agent.max_output_bytes)"),
        ("never calls", "status 1 without asking the model; its last line was: I have no idea"),
    ],
)
def test_each_fault_is_recorded_on_its_rollout_and_trains_nothing(groups, fault, words):
    group = groups[0][fault]
    for rollout in group.rollouts:
        assert rollout.stop == "failed"
        assert words in rollout.error
        assert rollout.scores == {}
        assert [message.text for message in rollout.messages[:1]] == ([] if fault == "never calls" else ["hello"])
    assert to_batch([group], [[1.0, 1.0]], mask_truncated=True).rows == 0


def test_calls_from_twenty_threads_are_twenty_rows_of_one_attempt(groups):
    for rollout in groups[0]["20 threads"].rollouts:
        assert rollout.error is None
        assert len(rollout.conversations) == 20
        said = {conversation.messages[0].text for conversation in rollout.conversations}
        assert said == {f"part {i}" for i in range(20)}
        assert rollout.reward == 0.5


def test_siblings_of_what_failed_are_untouched(groups):
    for rollout in groups[0]["nothing"].rollouts:
        assert rollout.error is None
        assert rollout.reward == 0.5
        assert rollout.info["exit_code"] == 0
