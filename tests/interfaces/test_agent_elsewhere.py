"""An agent in another network namespace; skipped where the machine permits none."""

import asyncio
import json
import os
import shutil
import subprocess
import sys

import pytest

from palestra.servers.openai.inference import load_completer
from palestra.sources.programs.outside import StandaloneGateway

TOKEN = "a-token-of-this-test"
AGENT = """
import json, sys, urllib.request


def post(url, body, key):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
        return json.load(answer)


url, token = sys.argv[1:]
taken = post(f"{url}/attempts", {"input": "hello"}, token)
ask = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
said = post(f"{taken['base_url']}/chat/completions", ask, taken["api_key"])
post(f"{url}/attempts/{taken['id']}/reward", {"reward": 1}, taken["api_key"])
print(json.dumps([taken["base_url"], said["object"]]))
"""


def call(*command: str, **options) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, capture_output=True, timeout=120, check=False, **options)


def last_line(done: subprocess.CompletedProcess[bytes]) -> str:
    return (done.stderr.decode().strip().splitlines() or ["no output"])[-1]


@pytest.fixture
def namespace():
    """A network namespace that reaches this machine by a veth pair; gives its name and our address in it."""
    name, ours, theirs = (f"pal{what}{os.getpid()}" for what in "nab")
    network = f"10.{os.getpid() // 250 % 250}.{os.getpid() % 250}"
    inside = ("ip", "netns", "exec", name, "ip")
    steps = [
        ("ip", "netns", "add", name),
        ("ip", "link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name),
        ("ip", "addr", "add", f"{network}.1/24", "dev", ours),
        ("ip", "link", "set", ours, "up"),
        (*inside, "addr", "add", f"{network}.2/24", "dev", theirs),
        (*inside, "link", "set", theirs, "up"),
    ]
    if shutil.which("ip") is None:
        pytest.skip("no network namespace: apt-get install iproute2")
    try:
        for step in steps:
            done = call(*step)
            if done.returncode:
                pytest.skip(f"no network namespace: `{' '.join(step)}`: {last_line(done)}")
        yield name, f"{network}.1"
    finally:
        call("ip", "netns", "del", name)
        call("ip", "link", "del", ours)


def test_an_agent_in_another_network_namespace_takes_a_case_and_reaches_its_model(namespace, tmp_path):
    name, host = namespace
    record = tmp_path / "rollouts.jsonl"

    async def run():
        lone = StandaloneGateway(load_completer("palestra/tiny"), record, host=host, token=TOKEN)
        await lone.gateway.start()
        command = ("ip", "netns", "exec", name, sys.executable, "-c", AGENT, lone.gateway.url, TOKEN)
        try:
            return lone.gateway.url, await asyncio.to_thread(call, *command)
        finally:
            await lone.gateway.close()

    url, ended = asyncio.run(run())
    assert ended.returncode == 0, ended.stderr.decode()
    base_url, said = json.loads(ended.stdout)
    assert url.startswith(f"http://{host}:")
    assert base_url.startswith(f"{url}/attempt/")
    assert said == "chat.completion"
    (rollout,) = map(json.loads, record.read_text().splitlines())
    assert rollout["error"] is None
