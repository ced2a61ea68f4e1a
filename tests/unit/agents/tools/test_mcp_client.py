"""MCP servers as tools: real processes, by the official client."""

import asyncio
import sys
import textwrap
from pathlib import Path

import pytest
from processes import has_ended

from palestra import Agent, EvalSuite
from palestra.agents.tools.mcp_client import McpConnection, McpServer
from palestra.agents.tools.run import run_calls
from palestra.core.errors import InputError, ServiceError
from palestra.core.types import ToolCall
from palestra.envs.suite_env import SuiteEnvironment

SERVER = Path(__file__).with_name("mcp_stand_in.py")


@pytest.fixture
def command():
    return [sys.executable, "-IS", str(SERVER)]


def called(connection, name, **arguments):
    tools = {tool.name: tool for tool in connection.tools}
    return asyncio.run(run_calls(tools, [ToolCall("1", name, arguments)], 20.0))[0]


def environment(*servers):
    suite = EvalSuite.from_records([{"input": "?"}], measures=[lambda ctx: True])
    return SuiteEnvironment(Agent("a", "m", mcp_servers=servers), suite)


def test_all_pages_of_a_servers_tools_come_with_their_schemas_and_calls_are_answered(command):
    connection = McpConnection(McpServer(command))
    assert [tool.name for tool in connection.tools] == ["double", "count", "whoami", "fail", "die"]
    double = connection.tools[0]
    assert double.description == "Twice a number."
    assert double.parameters["required"] == ["a"]
    assert called(connection, "double", a=21).content == "42"
    wrong = called(connection, "double", a="x")
    assert not wrong.ok
    assert not wrong.raised
    failed = called(connection, "fail")
    assert "no such item" in failed.content
    assert not failed.ok
    connection.close()


def test_a_server_that_dies_is_started_anew_for_the_next_call(command):
    connection = McpConnection(McpServer(command))
    called(connection, "count")
    died = called(connection, "die")
    assert died.raised
    assert "died during the call" in died.content
    assert called(connection, "count").content == "1"
    connection.close()


def test_a_server_sees_no_key_of_ours_but_those_given(command, monkeypatch):
    monkeypatch.setenv("A_SECRET_KEY", "sesame-sesame")
    connection = McpConnection(McpServer(command, env={"GIVEN": "this"}))
    assert called(connection, "whoami").content.split()[1:] == ["None", "this"]
    connection.close()


def test_each_attempt_has_a_server_of_its_own_unless_it_is_shared(command):
    own, shared = environment(command), environment(McpServer(command, shared=True))
    for env, same in ((own, False), (shared, True)):
        problem = env.problems("train")[0]
        first, second = env.open(problem), env.open(problem)
        pids = {called(episode, "whoami").content.split()[0] for episode in (first, second)}
        assert (len(pids) == 1) is same
        first.close()
        assert called(second, "double", a=1).content == "2"
        second.close()
        env.close()
        for pid in pids:
            assert has_ended(int(pid))


def test_a_server_that_does_not_start_is_told_with_its_last_words():
    with pytest.raises(ServiceError, match=r"did not start.*no database here"):
        McpConnection(McpServer([sys.executable, "-c", "raise SystemExit('no database here')"]))
    with pytest.raises(ServiceError, match="did not start"):
        McpConnection(McpServer("/no/such/program"))
    mute = [sys.executable, "-IS", "-c", "import time; time.sleep(60)"]
    with pytest.raises(ServiceError, match=r"no answer within 0\.3 s"):
        McpConnection(McpServer(mute, start_timeout_s=0.3))


def test_two_tools_of_one_name_are_refused(command):
    def double(a: int) -> int:
        """Twice."""
        return 2 * a

    suite = EvalSuite.from_records([{"input": "?"}], measures=[lambda ctx: True])
    env = SuiteEnvironment(Agent("a", "m", tools=[double], mcp_servers=[command]), suite)
    with pytest.raises(InputError, match="two tools are named 'double'"):
        env.open(env.problems("train")[0])


def test_what_is_no_server_is_refused():
    with pytest.raises(InputError, match="no MCP server"):
        Agent("a", mcp_servers=[3])
    with pytest.raises(InputError, match="empty command"):
        Agent("a", mcp_servers=[""])


def test_a_server_of_the_official_sdk_is_understood(tmp_path):
    file = tmp_path / "official.py"
    file.write_text(
        textwrap.dedent('''
        from mcp.server.mcpserver import MCPServer
        server = MCPServer("calculator")

        @server.tool()
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        server.run()
        ''')
    )
    connection = McpConnection(McpServer([sys.executable, str(file)]))
    assert called(connection, "add", a=2, b=3).content == "5"
    connection.close()
