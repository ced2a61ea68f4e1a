"""A script plays an agent over each transport: official MCP client on stdio and HTTP, and plain HTTP."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from mcp import Client, StdioServerParameters

sys.path.insert(0, str(Path(__file__).parent))
import rl_agent as agent


def calls_of(client: Client) -> Any:
    async def call(tool: str, /, **arguments: Any) -> dict[str, Any]:
        result = await client.call_tool(tool, arguments)
        assert json.loads(result.content[0].text) == result.structured_content
        answer = result.structured_content
        assert agent.PLANTED not in json.dumps(answer)
        assert result.is_error == ("error" in answer and "status" not in answer)
        return answer

    return call


@contextmanager
def server(folder: Path, *words: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server of ours as a process; its address."""
    process = subprocess.Popen(
        [*agent.PALESTRA, *words, "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=agent.server_environment(folder),
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1], process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_an_agent_trains_a_model_over_stdio(tmp_path: Path) -> None:
    agent.make_site(tmp_path)
    parameters = StdioServerParameters(
        command=agent.PALESTRA[0],
        args=[*agent.PALESTRA[1:], "mcp"],
        env=agent.server_environment(tmp_path),
        cwd=str(tmp_path),
    )

    async def play() -> None:
        async with Client(parameters) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert len(tools) == 10
            assert tools["rl_edit_config"].input_schema["required"] == ["field", "value"]
            assert tools["rl_list_runs"].annotations.read_only_hint is True
            assert tools["rl_stop_training"].annotations.destructive_hint is True
            call = calls_of(client)
            await agent.prepare(call)
            started = await call("rl_start_training")
            assert started["status"] == "starting"
            assert len(started["run_id"]) == 8
            assert started["wandb_run_name"] == started["config"]["wandb_name"]
            first, second = [await call("rl_check_status", run_id=started["run_id"]) for _ in range(2)]
            assert first["status"] != second["status"] or second["rate_limited"]
            results = await agent.check_results(call, started["run_id"])
            assert Path(started["config_path"]).is_file()
            assert results["report"]["after"]["n"] == 2
            uri = f"palestra://runs/{started['run_id']}/"
            assert uri + "report" in {str(r.uri) for r in (await client.list_resources()).resources}
            report = (await client.read_resource(uri + "report")).contents[0]
            assert json.loads(report.text)["after"]
            rollouts = (await client.read_resource(uri + "rollouts")).contents[0].text.splitlines()
            assert json.loads(rollouts[-1])["messages"]

    asyncio.run(play())
    agent.assert_no_secret_below(tmp_path)


@pytest.mark.slow
def test_a_run_goes_on_when_the_mcp_server_is_killed(tmp_path: Path) -> None:
    agent.make_site(tmp_path)

    begun: list[str] = []

    async def begin(url: str) -> None:
        async with Client(url) as client, Client(url) as other:
            call = calls_of(client)
            await agent.prepare(call)
            assert "error" in await calls_of(other)("rl_get_current_config")  # nobody sees another's selection
            begun.append((await call("rl_start_training"))["run_id"])
            process.kill()
            process.wait()
            await call("rl_list_runs")

    async def end(url: str, run_id: str) -> None:
        async with Client(url) as client:
            await agent.check_results(calls_of(client), run_id)

    with server(tmp_path, "mcp", "--http") as (url, process), pytest.raises(ExceptionGroup):  # the connection broke
        asyncio.run(begin(url))
    (run_id,) = begun
    with server(tmp_path, "mcp", "--http") as (url, process):
        asyncio.run(end(url, run_id))


def test_an_agent_trains_a_model_over_http(tmp_path: Path) -> None:
    agent.make_site(tmp_path)

    async def play(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as web:

            async def call(tool: str, /, session: str = "first-client", **arguments: Any) -> dict[str, Any]:
                answer = await web.post(f"/tools/{tool}", json=arguments, headers={"Palestra-Session": session})
                assert answer.status_code == 200, answer.text
                assert agent.PLANTED not in answer.text
                return dict(answer.json())

            await agent.prepare(call)
            assert "error" in await call("rl_get_current_config", session="second-client")
            started = await call("rl_start_training")
            await agent.check_results(call, started["run_id"])

    with server(tmp_path, "mcp", "--http") as (url, _):
        asyncio.run(play(url.removesuffix("/mcp")))
    agent.assert_no_secret_below(tmp_path)
