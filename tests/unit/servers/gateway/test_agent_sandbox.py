"""Programs in the sandbox: they reach the model, and neither our files nor any other port."""

import asyncio
import os
import socket
import sys
from pathlib import Path

import pytest
from real_gateway import open_attempt, with_gateway
from scripted_model import END, completer

from palestra.agent_source import AgentOptions
from palestra.agents.programs import Endpoint, ProgramLimits, command_agent
from palestra.envs.sandbox.program import ProgramSandbox, paths_below, program_paths
from palestra.envs.sandbox.sandbox import why_not

needs_namespaces = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
PROGRAM = """
import json, os, socket, sys, urllib.request
case = json.load(sys.stdin)
body = json.dumps({"model": "any", "messages": [{"role": "user", "content": case["input"]}]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
reply = json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))
found = {"said": reply["choices"][0]["message"]["content"]}

def attempt(name, act):
    try:
        found[name] = str(act())
    except OSError as error:
        found[name] = type(error).__name__

attempt("home", lambda: os.listdir(case["home"]))
attempt("secret", lambda: open(case["secret"]).read())
attempt("port", lambda: socket.create_connection(("127.0.0.1", case["port"]), timeout=2))
attempt("own folder", lambda: open(__file__, "a"))
found["user"] = os.getuid()
json.dump(found, open(os.environ["PALESTRA_RESULT_FILE"], "w"))
"""


@needs_namespaces
def test_a_program_in_the_sandbox_reaches_the_model_and_neither_our_files_nor_another_port(tiny_tokenizer, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "key").write_text("secret")
    (tmp_path / "agent").mkdir()
    script = tmp_path / "agent" / "my_agent.py"
    script.write_text(PROGRAM)
    other = socket.create_server(("127.0.0.1", 0))
    case = {"input": "Hello", "home": str(home), "secret": str(home / "key"), "port": other.getsockname()[1]}

    async def run(gateway):
        attempt = open_attempt(gateway)
        limits = ProgramLimits(timeout_s=30, sandbox=ProgramSandbox(gateway.port, gateway.socket_path).command)
        agent = command_agent([sys.executable, str(script)])
        ended = await agent.run(case, Endpoint(attempt.base_url, attempt.api_key), limits)
        return ended, await attempt.finish()

    with other:
        ended, rollout = with_gateway(completer(tiny_tokenizer, [f"Hi.{END}"]), run, unix_socket=True)
    assert ended.exit_code == 0, ended.stderr
    assert ended.result["said"] == "Hi."
    assert len(rollout.conversations) == 1
    assert (ended.result["home"], ended.result["secret"]) == ("FileNotFoundError", "FileNotFoundError")
    assert ended.result["port"] == "ConnectionRefusedError"
    assert ended.result["own folder"] in ("OSError", "PermissionError")
    assert ended.result["user"] != 0


@needs_namespaces
def test_a_program_in_the_sandbox_sees_neither_cases_nor_measures_nor_runs_in_its_own_folder(tmp_path):
    project = tmp_path / "project"  # that another user can read
    answers = [project / "cases.jsonl", project / "score.py", project / "runs" / "demo" / "rollouts.jsonl"]
    answers[-1].parent.mkdir(parents=True)
    for file in (*answers, project / "library.py"):
        file.write_text("the answer is 21")
    (project / "link.jsonl").symlink_to(answers[0])
    (project / "my_agent.py").write_text("")
    words = ["sh", "-c", "cat *.jsonl *.py; ls runs; test -e my_agent.py", "my_agent.py"]
    hidden = [*answers[:2], project / "runs", answers[-1].parent]
    sandbox = ProgramSandbox(9, str(tmp_path / "socket"), hidden)
    limits = ProgramLimits(timeout_s=60.0, sandbox=sandbox.command)
    agent = command_agent(words, cwd=project)
    ended = asyncio.run(agent.run({}, Endpoint("http://127.0.0.1:9/v1", "key"), limits))
    assert (ended.exit_code, ended.stdout) == (0, "the answer is 21"), ended.stderr  # of the library alone


def test_a_file_that_the_command_names_is_not_hidden(tmp_path):
    for name in ("agent.py", "cases.jsonl"):
        (tmp_path / name).write_text("")
    files = [tmp_path / "agent.py", tmp_path / "cases.jsonl", tmp_path / "missing.jsonl", tmp_path]
    hidden = paths_below([str(tmp_path), "/usr"], files, [tmp_path, tmp_path / "agent.py"])
    assert hidden == [str(tmp_path / "cases.jsonl")]


def test_the_options_of_a_program_name_the_files_with_its_answers(tmp_path):
    (tmp_path / "cases.jsonl").write_text('{"input": "a", "expect": 1}\n{"input": "b", "expect": 2}\n')
    (tmp_path / "score.py").write_text("def score(ctx):\n    return True\n")
    measure = f"{tmp_path}/score.py:score"
    options = AgentOptions("sh", cases=f"{tmp_path}/cases.jsonl", held_out="0.5", measure=[measure], cwd=str(tmp_path))
    _, agent, _ = options.open(None, {})
    assert [file.name for file in agent.answer_files if file.exists() and file.suffix != ".pyc"] == [
        "cases.jsonl",
        "score.py",
    ]


@needs_namespaces
def test_a_program_that_hangs_in_the_sandbox_ends_with_all_that_it_has_started(tmp_path):
    (tmp_path / "agent").mkdir()
    script = tmp_path / "agent" / "hangs.sh"
    script.write_text("sleep 987654 & sleep 987654")
    limits = ProgramLimits(timeout_s=2.0, sandbox=ProgramSandbox(9, str(tmp_path / "socket")).command)
    ended = asyncio.run(command_agent(["sh", str(script)]).run({}, Endpoint("http://127.0.0.1:9/v1", "key"), limits))
    assert ended.stopped == "time"
    assert not [each for each in _command_lines() if "987654" in each]


def test_a_sandbox_shows_a_program_its_own_folders_and_no_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "project").mkdir()
    for file in ("at_home.py", "project/agent.py"):
        (tmp_path / file).write_text("")
    assert program_paths(["sh", "at_home.py"], tmp_path) == [str(tmp_path / "at_home.py")]
    assert program_paths(["sh", "project/agent.py"], tmp_path) == [str(tmp_path / "project")]


def test_a_result_that_is_a_link_is_not_read(tmp_path):
    script = tmp_path / "links.py"
    script.write_text("import os; os.symlink('/etc/hostname', os.environ['PALESTRA_RESULT_FILE'])")
    agent = command_agent([sys.executable, str(script)])
    ended = asyncio.run(agent.run({}, Endpoint("http://127.0.0.1:9/v1", "key"), ProgramLimits(timeout_s=20)))
    assert ended.exit_code == 0
    assert ended.result is None


def _command_lines() -> list[str]:
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            found.append(Path("/proc", process, "cmdline").read_text())
        except OSError:
            continue
    return found
