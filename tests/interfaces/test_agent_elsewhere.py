"""Agents in real containers, and in another network namespace; skipped where the machine has neither.

An image holds nothing but a static busybox: `apt-get install podman busybox-static`.
"""

import asyncio
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from palestra.agents.containers import Containers
from palestra.core.errors import PalestraError
from palestra.servers.openai.inference import load_completer
from palestra.sources.programs.outside import StandaloneGateway

IMAGE = f"palestra-test-busybox:{os.getpid()}"
ASK = r"""
question=$(busybox sed -n 's/.*"input": *"\([^"]*\)".*/\1/p')
busybox wget -q -O /palestra/result.json --header "Authorization: Bearer $OPENAI_API_KEY" \
  --header "Content-Type: application/json" "$OPENAI_BASE_URL/chat/completions" \
  --post-data "{\"model\": \"m\", \"messages\": [{\"role\": \"user\", \"content\": \"$question\"}]}"
"""
# The score needs the whole way: the container's result file, and the address that it was given.
MEASURE = """
def length(ctx):
    assert ctx.program.result["object"] == "chat.completion"
    return min(1.0, len(ctx.final_assistant_message.text) / 200)
"""
TRAIN = (
    "--train.max_steps 1 --train.problems_per_step 1 --rollout.group_size 2 --rollout.max_new_tokens 16 --eval.cases 1"
)
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


@pytest.fixture(scope="module")
def engine():
    """docker or podman, with an image; skips where none of them can run a container."""
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("no busybox for an image: apt-get install busybox-static")
    try:
        found = Containers.of_image(IMAGE).engine
    except PalestraError as error:
        pytest.skip(str(error))
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(Path(busybox).resolve(), "bin/busybox")
    imported = call(found, "import", "-", IMAGE, input=archive.getvalue())
    try:
        ran = call(found, "run", "--rm", IMAGE, "/bin/busybox", "true") if imported.returncode == 0 else imported
        if ran.returncode:
            pytest.skip(f"{found} cannot run a container here: {last_line(ran)}")
        yield found
    finally:
        call(found, "rmi", "--force", IMAGE)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_an_agent_in_a_container_trains_by_its_own_network(engine, cli, monkeypatch, tmp_path, host):
    monkeypatch.setenv("PALESTRA_TOKEN", TOKEN)
    if host == "127.0.0.1":
        try:
            Containers.of_image(IMAGE).gateway_host()
        except PalestraError as error:
            pytest.skip(str(error))
    Path("score.py").write_text(MEASURE)
    agent = ["--agent-image", IMAGE, "--agent-cmd", shlex.join(["/bin/busybox", "sh", "-c", ASK]), "--agent-host", host]
    folder = Path(cli.json("train", *agent, "--measure", "score.py:length", *TRAIN.split())["run_dir"])
    attempts = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    assert [attempt["error"] for attempt in attempts] == [None, None]
    (step,) = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    assert (step["agent/rows_per_attempt"], step["agent/retokenised_turns"]) == (1.0, 0.0)
    assert b"palestra-attempt" not in call(engine, "ps", "--all").stdout


def test_a_container_that_takes_too_long_is_gone(engine, cli):
    Path("score.py").write_text(MEASURE)
    agent = ["--agent-image", IMAGE, "--agent-cmd", "/bin/busybox sleep 600", "--agent.timeout_s", "1"]
    ended = cli("eval", *agent, "--measure", "score.py:length", "--eval.cases", "1")
    assert ended.code != 0
    assert "agent.timeout_s" in ended.err
    assert b"palestra-attempt" not in call(engine, "ps", "--all").stdout


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
