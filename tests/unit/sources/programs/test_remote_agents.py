"""Agents in containers and on other machines: the token, the addresses that they are given, and `--agent-image`."""

import asyncio
import json
import os
import socket
import sys
from pathlib import Path

import httpx
import pytest

from palestra.agents import containers
from palestra.agents.programs import Endpoint, ProgramLimits, command_agent
from palestra.core.errors import MissingPackageError, NotAllowedError, UnsupportedError
from palestra.servers.gateway.gateway import Gateway
from palestra.servers.web import reachable_url
from palestra.sources.programs.outside import StandaloneGateway

TOKEN = "a-token-of-this-test"
ASK = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]}
# Stands for docker: runs the command here, with the variables and the folder that a container would have.
DOCKER = f"""#!{sys.executable}
import json, os, sys
words = sys.argv[1:]
with open({{log!r}}, "a") as log:
    log.write(json.dumps(words) + "\\n")
if words[:3] == ["network", "inspect", "bridge"]:
    print({{bridge!r}})
if words[0] == "info":
    print({{rootless!r}})
if words[0] == "run":
    at = words.index("image:1")
    names = [words[i + 1] for i in range(at) if words[i] == "--env"]
    folder, inside, _ = words[words.index("--volume") + 1].split(":")
    env = {{{{name: os.environ[name].replace(inside + "/", folder + "/") for name in names}}}}
    os.execve(words[at + 1], words[at + 1 :], env)
"""


REPORT = """
import json, os, sys
case = json.load(open(os.environ["PALESTRA_CASE_FILE"]))
assert json.load(sys.stdin) == case
json.dump([case["input"], dict(os.environ)], open(os.environ["PALESTRA_RESULT_FILE"], "w"))
"""


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """A stand-in for docker on the PATH; gives the file with the arguments of its calls."""
    log, program = tmp_path / "calls.jsonl", tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(DOCKER.format(log=str(log), bridge="127.0.0.2", rootless=""))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    return log


def stand_in(docker: Path, engine: str = "docker", bridge: str = "", rootless: str = "") -> None:
    """Replace the stand-in by one that says this of its network."""
    (docker.parent / "bin" / "docker").unlink()
    program = docker.parent / "bin" / engine
    program.write_text(DOCKER.format(log=str(docker), bridge=bridge, rootless=rootless))
    program.chmod(0o755)


def calls(log: Path) -> list[list[str]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def run_in_container(text: str, base_url="http://172.17.0.1:9/attempt/a/v1", timeout_s=60.0, **options):
    agent = command_agent([sys.executable, "-c", text], image="image:1", **options)
    return asyncio.run(agent.run({"input": "hi"}, Endpoint(base_url, "sk-own", "a"), ProgramLimits(timeout_s)))


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


def test_an_attempt_in_a_container_gets_its_case_and_endpoint_and_returns_its_result(docker, monkeypatch):
    monkeypatch.setenv("PALESTRA_PASS_ENV", "DATA")
    monkeypatch.setenv("DATA", "passed-on")
    monkeypatch.setenv("MY_API_KEY", "not-yours")
    ended = run_in_container(REPORT, env={"MORE": "1"})
    assert ended.exit_code == 0, ended.stderr
    said, variables = ended.result
    assert said == "hi"
    assert variables["OPENAI_BASE_URL"] == "http://172.17.0.1:9/attempt/a/v1"
    assert (variables["OPENAI_API_KEY"], variables["MORE"], variables["DATA"]) == ("sk-own", "1", "passed-on")
    assert "MY_API_KEY" not in variables
    version, _, run = calls(docker)
    assert version == ["version"]
    assert not any("sk-own" in word or "passed-on" in word for word in run)


def networks(run: list[str]) -> list[str]:
    return [word for word in run if word.startswith(("--network", "--net", "--add-host", "--publish"))]


def test_a_container_has_a_network_of_its_own_and_of_our_loopback_the_attempts_ports_alone(docker):
    folder = docker.parent
    urls = ["http://127.0.0.1:8001/attempt/a/v1", "http://127.0.0.1:8002/attempt/b/v1", "http://127.0.0.1:8001/v1"]
    rootless = containers.Containers("podman", "image:1", is_rootless=True)
    assert networks(rootless.command((), "n", folder, (), urls)) == ["--network=pasta:-T,8001,-T,8002"]
    for engine in (rootless, containers.Containers("docker", "image:1")):
        assert networks(engine.command((), "n", folder, (), ["http://172.17.0.1:8001/attempt/a/v1"])) == []


def test_a_gateway_for_containers_of_docker_listens_on_the_bridge_alone(docker):
    assert containers.Containers.of_image("image:1").gateway_host() == "127.0.0.2"  # stands for that of a bridge


@pytest.mark.parametrize("bridge", ["192.0.2.1", "", "<no value>"], ids=["not-of-this-machine", "none", "no-value"])
def test_without_a_bridge_of_this_machine_an_address_must_be_named(docker, bridge):
    stand_in(docker, bridge=bridge)
    with pytest.raises(UnsupportedError, match="--agent-host"):
        containers.Containers.of_image("image:1").gateway_host()


@pytest.mark.parametrize(("rootless", "host"), [("true", "127.0.0.1"), ("false", None)])
def test_podman_of_an_ordinary_user_hands_ports_of_loopback_on(docker, rootless, host):
    stand_in(docker, "podman", rootless=rootless)
    found = containers.Containers.of_image("image:1")
    assert (found.engine, found.is_rootless) == ("podman", host is not None)
    if host is None:
        with pytest.raises(UnsupportedError):
            found.gateway_host()
    else:
        assert found.gateway_host() == host


def test_a_container_that_takes_too_long_is_removed(docker):
    ended = run_in_container("import time; time.sleep(600)", timeout_s=0.5)
    assert ended.stopped == "time"
    run, removed = calls(docker)[-2:]
    assert removed == ["rm", "--force", run[run.index("--name") + 1]]


def test_an_image_without_an_engine_that_works_is_refused_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingPackageError, match=r"docker is not installed; podman is not installed"):
        command_agent((), image="image:1")
    broken = tmp_path / "podman"
    broken.write_text("#!/bin/sh\necho Cannot connect to Podman >&2\nexit 125\n")
    broken.chmod(0o755)
    with pytest.raises(MissingPackageError, match=r"docker is not installed; .*Cannot connect to Podman"):
        command_agent((), image="image:1")


def test_containers_in_a_virtual_machine_need_another_address_than_loopback(docker, monkeypatch):
    monkeypatch.setattr(containers.sys, "platform", "darwin")
    image = containers.Containers("docker", "image:1")
    folder, urls = docker.parent, ["http://10.0.0.5:9/v1"]
    for engine in (image, containers.Containers("podman", "image:1", is_rootless=True)):
        with pytest.raises(UnsupportedError, match="--agent-host"):
            engine.gateway_host()
    assert image.command((), "n", folder, (), urls)[:2] == ["docker", "run"]
    assert "--init" in image.command((), "n", folder, (), urls)
    podman = containers.Containers("podman", "image:1")
    assert "--init" not in podman.command((), "n", folder, (), urls)  # it has no catatonit here
    assert os.stat(folder).st_mode & 0o777 == 0o777
