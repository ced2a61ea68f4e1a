"""The transports of the rl_* tools: access, sessions, and that no client waits for another."""

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from mcp import Client
from starlette.testclient import TestClient

from palestra.extras.agent_tools import TOOL_NAMES, RlTools, mcp_server
from palestra.extras.agent_tools.clients import Clients
from palestra.extras.agent_tools.locks import RequestLimits, Site
from palestra.runs.manager import RunManager

sys.path.insert(0, str(Path(__file__).parent))
import rl_agent

CLIENT = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "a test", "version": "1"}}
INITIALIZE = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": CLIENT}
LIMITS = RequestLimits(test_minutes=0.02)


@pytest.fixture
def clients(tmp_path):
    manager = RunManager(tmp_path / "home")
    return Clients(lambda: RlTools(manager, Site(limits=LIMITS)))


def web(clients, token=None) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(mcp_server.http_app(clients, token))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8002", timeout=60)


def ask(client_maker, *requests):
    async def all_of_them():
        async with client_maker() as client:
            return [await client.request(method, path, **more) for method, path, more in requests]

    return asyncio.run(all_of_them())


async def over_python(clients, play) -> None:
    async def call(tool, /, **arguments):
        answer = clients.session("one").call(tool, arguments)
        json.dumps(answer, allow_nan=False)
        return answer

    await play(call)


async def over_http(clients, play) -> None:
    async with web(clients) as client:

        async def call(tool, /, **arguments):
            headers = {"Palestra-Session": "the-same-one"}
            answer = await client.post(f"/tools/{tool}", json=arguments, headers=headers)
            assert answer.status_code == 200
            return answer.json()

        await play(call)


async def over_mcp(clients, play) -> None:
    async with Client(mcp_server.make_server(clients), mode="legacy") as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == list(TOOL_NAMES)

        async def call(tool, /, **arguments):
            result = await client.call_tool(tool, arguments)
            assert json.loads(result.content[0].text) == result.structured_content
            assert result.is_error == ("error" in result.structured_content)
            return result.structured_content

        await play(call)


@pytest.mark.parametrize("transport", [over_python, over_http, over_mcp])
def test_every_tool_answers_alike_through_every_transport(tmp_path, monkeypatch, transport):
    rl_agent.make_site(tmp_path)
    monkeypatch.chdir(tmp_path)
    manager = rl_agent.OneRun(tmp_path / "home")
    clients = Clients(lambda: RlTools(manager, Site(maximum={"train.max_steps": 3}, run={"lora.r": 0})))

    async def play(call) -> None:
        await rl_agent.prepare(call)
        answer = await call("rl_start_training")
        assert answer["status"] == "starting"
        (request,) = manager.requests
        assert request.environment.endswith("echo_number.py:Echo")
        assert request.env_settings == {"largest": 5}
        assert (request.settings["train.max_steps"], request.settings["lora.r"]) == (1, 0)
        assert request.settings["track.run_name"] == answer["wandb_run_name"]
        assert (await call("rl_check_status", run_id="abcd2345"))["metrics"]["reward_mean"] is None
        assert (await call("rl_check_status", run_id="abcd2345"))["rate_limited"]
        assert (await call("rl_list_runs"))["count"] == 1
        for tool in ("rl_get_results", "rl_stop_training"):
            assert "no run" in (await call(tool, run_id="zzzzzzzz"))["error"]
        assert "named twice" in (await call("rl_test_inference", models=["m", "m"]))["error"]

    asyncio.run(transport(clients, play))


POST = ("POST", "/tools/rl_list_runs")
ELSEWHERE = ("POST", "http://box.example:8002/tools/rl_list_runs")


@pytest.mark.parametrize(
    ("token", "request_", "headers", "status"),
    [
        (None, POST, {}, 200),
        (None, POST, {"Host": "evil.example"}, 403),
        (None, POST, {"Origin": "https://evil.example"}, 403),
        (None, POST, {"Origin": "http://localhost:3000"}, 200),
        (None, POST, {"Palestra-Session": "x y"}, 400),
        ("a-long-token", ELSEWHERE, {}, 401),
        ("a-long-token", ELSEWHERE, {"Authorization": "Bearer another"}, 401),
        ("a-long-token", ELSEWHERE, {"Authorization": "Bearer a-long-token"}, 200),
    ],
)
def test_http_answers_loopback_or_the_token_and_no_other_site(clients, token, request_, headers, status):
    (answer,) = ask(lambda: web(clients, token), (*request_, {"headers": headers}))
    assert answer.status_code == status


def test_other_addresses_than_loopback_need_a_token(cli, monkeypatch):
    monkeypatch.delenv("PALESTRA_TOKEN", raising=False)
    assert "set a token" in cli.error("mcp", "--http", "--host", "0.0.0.0", "--port", "0")


def test_palestra_http_names_the_command_that_replaces_it(cli):
    assert "palestra mcp --http" in cli.error("http", "--port", "0")


def test_http_gives_a_session_and_keeps_to_it(clients):
    first, other = ask(lambda: web(clients), *[("POST", "/tools/rl_get_current_config", {})] * 2)
    session = first.headers["Palestra-Session"]
    assert other.headers["Palestra-Session"] != session
    clients.session(session)._pending = rl_agent.pending()
    headers = {"Palestra-Session": session}
    (again,) = ask(lambda: web(clients), ("POST", "/tools/rl_get_current_config", {"headers": headers}))
    assert again.json()["environment"] == "calculator"


def test_http_answers_what_is_no_tool_or_no_json_with_an_error_in_json(clients):
    methods = [(method, f"/tools/{name}", {}) for name in TOOL_NAMES for method in ("GET", "PUT", "DELETE")]
    answers = ask(
        lambda: web(clients),
        ("POST", "/tools/rl_edit_config", {"content": b"{"}),
        ("POST", "/tools/rl_edit_config", {"content": b"[" * 100_000}),
        ("POST", "/tools/rl_edit_config", {"json": [1]}),
        ("POST", "/tools/rl_nothing", {}),
        ("GET", "/runs/zzzzzzzz/report", {}),
        *methods,  # only POST changes something
    )
    assert [answer.status_code for answer in answers] == [400, 400, 200, 404, 404, *[405] * len(methods)]
    assert all("error" in answer.json() for answer in answers)


def test_http_answers_others_while_models_are_tested(clients):
    async def play() -> None:
        async with web(clients) as client:
            session = {"Palestra-Session": "the-same-one"}
            clients.session("the-same-one")._pending = rl_agent.pending(Site(limits=LIMITS))
            asked = {"num_steps": 1, "group_size": 2, "models": ["palestra/tiny"]}
            testing = asyncio.create_task(client.post("/tools/rl_test_inference", json=asked, headers=session))
            await asyncio.sleep(0.3)
            assert (await client.post("/tools/rl_list_runs", headers=session)).json() == {"runs": [], "count": 0}
            assert not testing.done()
            assert (await testing).json()["results"][0]["status"] == "timed out"

    asyncio.run(play())


def test_mcp_tells_progress_while_models_are_tested(clients):
    told = []

    async def note(done, total, message):
        told.append((done, total, message))

    async def play() -> None:
        async with Client(mcp_server.make_server(clients), mode="legacy") as client:
            clients.session("stdio")._pending = rl_agent.pending(Site(limits=LIMITS))
            asked = {"num_steps": 2, "group_size": 2, "models": ["palestra/tiny"]}
            result = await client.call_tool("rl_test_inference", asked, progress_callback=note)
            assert result.structured_content["results"][0]["status"] == "timed out"

    asyncio.run(play())
    assert told[0] == (0, 2, "palestra/tiny: 0 of 2 problems")


def test_mcp_over_http_is_guarded_and_its_clients_have_sessions(clients):
    guarded = mcp_server.http_app(clients, "a-long-token")
    with TestClient(guarded, base_url="http://box.example:8002") as client:
        for key, status in (("Bearer another", 401), ("Bearer a-long-token", 200)):
            headers = {"Accept": "application/json, text/event-stream", "Authorization": key}
            assert client.post("/mcp", json=INITIALIZE, headers=headers).status_code == status
    app = mcp_server.http_app(clients, None)
    accepts = {"Accept": "application/json, text/event-stream"}
    with TestClient(app, base_url="http://127.0.0.1:8002") as client:
        refused = client.post("/mcp", json=INITIALIZE, headers={**accepts, "Host": "evil.example"})
        foreign = client.post("/mcp", json=INITIALIZE, headers={**accepts, "Origin": "https://evil.example"})
        newest = client.post("/mcp", json=INITIALIZE, headers={**accepts, "MCP-Protocol-Version": "2026-07-28"})
        sessions = {client.post("/mcp", json=INITIALIZE, headers=accepts).headers["mcp-session-id"] for _ in range(2)}
    assert (refused.status_code, foreign.status_code) == (403, 403)
    assert newest.status_code == 400
    assert "2025-11-25" in newest.json()["error"]["data"]["supported"]
    assert len(sessions) == 2


def stdio_server(command, folder, stderr=None):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr}
    return subprocess.Popen(command, **pipes, text=True, cwd=folder, env=rl_agent.server_environment(folder))


def test_stdout_of_the_stdio_server_carries_the_protocol_alone(tmp_path):
    rl_agent.make_site(tmp_path)  # its environment prints while it is imported

    def call(number: int, tool: str, **arguments: str) -> dict:
        params = {"name": tool, "arguments": arguments}
        return {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}

    messages = [
        INITIALIZE,
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        call(2, "rl_select_environment", name="echo-number"),
        call(3, "rl_nothing"),
    ]
    process = stdio_server([*rl_agent.PALESTRA, "mcp"], tmp_path)
    assert process.stdin is not None
    assert process.stdout is not None
    for message in messages:
        process.stdin.write(json.dumps(message) + "\n")
    process.stdin.flush()
    answers = {}
    while len(answers) < 3:
        answer = json.loads(process.stdout.readline())
        answers[answer["id"]] = answer["result"]
    process.stdin.close()
    assert process.wait(20) == 0
    assert process.stdout.read() == ""
    assert answers[2]["structuredContent"]["environment"] == "echo-number"
    assert answers[3]["isError"] is True


def test_ctrl_c_ends_the_stdio_server_though_its_client_is_silent(tmp_path):
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "import sys; sys.argv = ['palestra', 'mcp']; from palestra.cli.main import main; main()"
    process = stdio_server([sys.executable, "-c", code], tmp_path, stderr=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(INITIALIZE) + "\n")
    process.stdin.flush()
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert process.stderr is not None
    assert process.stderr.read().endswith("Stopped.\n")


def test_the_session_that_was_silent_longest_is_forgotten_first():
    made = Clients(lambda: object(), max_sessions=2)  # type: ignore[arg-type,return-value]
    a, b = made.session("a"), made.session("b")
    assert made.session("a") is a
    made.session("c")
    assert made.session("a") is a
    assert made.session("b") is not b
