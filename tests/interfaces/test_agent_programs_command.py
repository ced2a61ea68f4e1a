"""`palestra train --agent-cmd …`: a program of the user's is trained, resumed and scored like any other agent."""

import asyncio
import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from palestra.agent_source import AgentOptions
from palestra.agents.programs import Endpoint, ProgramLimits, command_agent
from palestra.api import GRPOTrainer
from palestra.core.config import RunConfig
from palestra.core.errors import SettingError
from palestra.core.run_folder import RunFolder
from palestra.envs.sandbox.sandbox import why_not

PROGRAM = """
import json, os, sys, urllib.request
case = json.load(sys.stdin)
assert "expect" not in case
body = {"model": "any", "max_tokens": 6, "messages": [{"role": "user", "content": case["input"]}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
answer = json.load(opener.open(urllib.request.Request(url, json.dumps(body).encode(), headers)))
print(answer["choices"][0]["message"]["content"])
"""
SCORE = """
def even(ctx):
    assert ctx.program.stdout.strip() == ctx.final_assistant_message.text.strip()
    return len(ctx.program.stdout) % 2 == 0
"""
SMALL = (
    "--train.max_steps 1 --train.problems_per_step 2 --rollout.group_size 2 --rollout.max_new_tokens 8 "
    "--train.refill_limit 0 --eval.cases 1 --rollout.temperature 1 --json"
).split()


@pytest.fixture
def program(tmp_path, monkeypatch):
    """The options that name the program, the cases and the measure, with paths relative to the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("agent.py").write_text(PROGRAM)
    Path("score.py").write_text(SCORE)
    cases = [{"input": f"What does a red lamp cost {i} times?", "expect": str(i)} for i in range(5)]
    Path("cases.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases))
    command = shlex.join([sys.executable, "-IS", "agent.py"])
    return ["--agent-cmd", command, "--cases", "cases.jsonl", "--measure", "score.py:even"]


def test_a_program_is_trained_and_resumed_from_anywhere(cli, program, tmp_path, monkeypatch):
    trained = cli.ok("train", *program, *SMALL)
    run = RunFolder.open(Path(json.loads(trained.out)["run_dir"]).absolute())
    rollouts = list(run.rollouts())
    assert len(rollouts) == 4
    assert all(rollout["info"]["exit_code"] == 0 for rollout in rollouts)
    assert all([turn["maker"] for turn in rollout["turns"]] == ["template", "model"] for rollout in rollouts)
    (row,) = run.metrics()
    assert row["agent/rows_per_attempt"] == 1.0
    assert row["agent/retokenised_turns"] == 0.0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    cli.ok("train", "--resume", str(run.path), "--train.max_steps", "2", "--json")
    assert [int(row["step"]) for row in run.metrics()] == [1, 2]


def test_the_token_for_other_machines_reaches_the_gateway_and_no_file(program, monkeypatch):
    monkeypatch.setenv("PALESTRA_TOKEN", "a-token-of-this-test")
    for options in ({"agent_cmd": "python agent.py"}, {"agent_port": 0}):
        chosen = AgentOptions(cases="cases.jsonl", measure=("score.py:even",), agent_host="0.0.0.0", **options)
        _, agent, _ = chosen.open(None, {})
        assert (agent.host, agent.token) == ("0.0.0.0", "a-token-of-this-test")
        assert "a-token-of-this-test" not in repr((chosen.record(), chosen.arguments(), agent))
        assert "--agent-host" in chosen.arguments()


def test_the_script_for_containers_hands_on_the_case_the_address_and_the_result(tmp_path, monkeypatch):
    """With a stand-in for docker that runs the command here, with the variables that the script names."""
    page = (Path(__file__).parents[2] / "docs" / "bring_your_agent.md").read_text()
    (tmp_path / "in_docker.sh").write_text(re.findall(r"```sh\n(folder=.*?)```", page, re.DOTALL)[0])
    (tmp_path / "agent.py").write_text(
        "import json, os, sys\n"
        "file = open(os.environ['PALESTRA_RESULT_FILE'], 'w')\n"
        "json.dump([json.load(sys.stdin), os.environ['OPENAI_BASE_URL'], os.environ['OPENAI_API_KEY']], file)\n"
    )
    docker = tmp_path / "docker"
    docker.write_text(
        f"#!{sys.executable}\nimport os, sys\nwords = sys.argv[1:]\nat = words.index('my-agent:latest')\n"
        "folder, inside = words[words.index('-v') + 1].split(':')\n"
        "assert folder == inside and os.path.exists(folder + '/case.json')\n"
        "names = [words[i + 1] for i in range(at) if words[i] == '-e'] + ['PATH']\n"
        "os.execvpe(words[at + 1], words[at + 1 :], {name: os.environ[name] for name in names})\n"
    )
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    agent = command_agent("sh in_docker.sh", cwd=tmp_path)
    endpoint = Endpoint("http://127.0.0.1:9/attempt/a/v1", "sk-own", "a")
    ended = asyncio.run(agent.run({"input": "hi"}, endpoint, ProgramLimits(60.0)))
    assert ended.exit_code == 0, ended.stderr
    assert ended.result == [{"input": "hi"}, endpoint.base_url, "sk-own"]


def test_a_stored_run_is_resumed_unless_it_used_a_container_image():
    assert AgentOptions.from_record({"agent_cmd": "sh a.sh", "agent_image": None}).agent_cmd == "sh a.sh"
    with pytest.raises(SettingError, match="--agent-cmd 'docker run"):
        AgentOptions.from_record({"agent_image": "shop:1"})


def test_a_command_that_does_not_exist_is_told_before_a_run_begins(cli, program):
    assert "pyton agent.py" in cli.error("train", "--agent-cmd", "pyton agent.py", *program[2:])
    assert not Path("runs").exists()


def test_options_that_do_not_go_together_are_refused(cli, program):
    for words, reason in (
        ([*program, "--agent-port", "0"], "choose"),
        ([*program, "--agent-host", "0.0.0.0"], "set a token"),
        (["--agent-host", "127.0.0.1"], "goes with --agent-port"),
        (["--agent-image", "x"], "--agent-cmd 'docker run"),
        ([*program, "--mcp", "python server.py"], "our own agent loop"),
        (["--agent-cmd", "sh -c 'echo"], "no closing quotation"),
        (["--mcp", "sh -c 'echo", "--cases", "cases.jsonl", "--measure", "score.py:even"], "no closing quotation"),
        (["--cases", "cases.jsonl"], "needs a measure"),
        (["--held-out", "0.1"], "goes with --cases"),
        (["--cases", "cases.jsonl", "--measure", "score.py"], "expected FILE:NAME"),
        (["--cases", "cases.jsonl", "--measure", "nope.py:score"], "nope.py:score: there is no file"),
        (["--cases", "cases.jsonl", "--measure", "score.py:evn"], "Did you mean 'even'"),
        ([*program, "--env", "calculator"], "does not go with --env"),
        ([*program, "--rollout.tool_timeout_s", "3", *SMALL], "the agent runs its tools itself"),
        (["--agent.timeout_s", "3", *SMALL], "has no program of its own"),
        (
            ["--agent-port", "0", "--cases", "cases.jsonl", *SMALL, "--agent.gateway_workers", "2"],
            "external agents know the gateway's own address alone",
        ),
    ):
        answer = cli.error("train", *words)
        assert reason in answer, answer


def page_blocks(language):
    text = (Path(__file__).parents[2] / "docs" / "bring_your_agent.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.slow("three runs: make test-agents, make test-slow")
def test_the_page_works_as_given(cli, tmp_path, monkeypatch):
    """Its three files by the command line, then its blocks of Python; all in short runs."""
    score, agent, *several_agents, by_command, by_function = page_blocks("python")
    for text in several_agents:  # parts of a program
        compile(text, "docs/bring_your_agent.md", "exec", dont_inherit=True)
    (case,) = page_blocks("json")
    Path("score.py").write_text(score)
    Path("my_agent.py").write_text(agent)
    Path("cases.jsonl").write_text("".join(case.replace("red", color) for color in ("red", "blue", "green")))
    train = ["--agent-cmd", f"{sys.executable} my_agent.py", "--cases", "cases.jsonl", "--measure", "score.py:score"]
    cli.ok("train", *train, *SMALL)
    resolve = GRPOTrainer._resolve
    short = {
        "train": {"max_steps": 1, "problems_per_step": 1},
        "rollout": {"group_size": 2, "max_new_tokens": 8},
        "eval": {"cases": 1},
    }
    monkeypatch.setattr(GRPOTrainer, "_resolve", lambda self, n: RunConfig.build(resolve(self, n).model_dump(), short))
    for text in (by_command.replace('"python"', repr(sys.executable)), by_function):
        exec(compile(text, "docs/bring_your_agent.md", "exec", dont_inherit=True), {})
    assert len(list(Path("runs").iterdir())) == 3


def test_an_mcp_servers_tools_are_offered_by_our_own_loop_and_kept_for_a_resumed_run(cli, program):
    server = Path(__file__).parents[1] / "unit" / "agents" / "tools" / "mcp_stand_in.py"
    Path("score.py").write_text("def score(ctx):\n    return len(ctx.messages) % 2 == 0")
    mcp = ["--mcp", shlex.join([sys.executable, "-IS", str(server)])]
    cases = ["--cases", "cases.jsonl", "--measure", "score.py:score", "--instructions", "Use the tools."]
    answer = cli.ok("train", *mcp, *cases, *SMALL)
    run = RunFolder.open(Path(json.loads(answer.out)["run_dir"]))
    for rollout in run.rollouts():
        assert rollout["tool_names"] == ["double", "count", "whoami", "fail", "die"]
        assert rollout["messages"][0]["text"] == "Use the tools."
    assert AgentOptions.from_record(run.record["agent_options"]).mcp == mcp[1:]


PEEK = """
import contextlib, glob, os
seen = []
for name in (*glob.glob("**", recursive=True), *glob.glob("/tmp/*"), "cases.jsonl", *json.loads(PLACES)):
    try:
        seen.append([name, os.listdir(name) if os.path.isdir(name) else open(name).read()])
    except OSError as error:
        seen.append([name, error.strerror])
for name in ("cases.jsonl", "data/score.py"):
    for act in (os.remove, lambda name: os.rename(name, "away"), lambda name: open(name, "w")):
        with contextlib.suppress(OSError):
            act(name)
print(json.dumps(seen), file=sys.stderr)
"""


@pytest.mark.skipif(sys.platform != "linux" or why_not() is not None, reason=f"no user namespaces: {why_not()}")
@pytest.mark.parametrize("place", ["beside the program", "elsewhere"])
def test_a_program_in_the_sandbox_sees_no_answers_and_no_run_and_works_otherwise(cli, program, tmp_path, place):
    folder = tmp_path if place == "beside the program" else tmp_path / "sub"
    (folder / "data").mkdir(parents=True)
    cases = Path("cases.jsonl").rename(folder / "cases.jsonl")
    measure = Path("score.py").rename(folder / "data" / "score.py")
    places = [str(path) for path in (cases, measure, Path("runs").absolute(), Path.home())]
    Path("agent.py").write_text(PROGRAM + PEEK.replace("PLACES", repr(json.dumps(places))))
    Path("notes.txt").write_text("of the program")
    tmp_path.chmod(0o755)  # of root's programs in the sandbox, which run as another user
    files = ["--cases", str(cases), "--measure", f"{measure}:even"]
    trained = cli.ok("train", *program[:2], *files, *SMALL, "--agent.sandbox", "true", "--checkpoint.every", "1")
    assert "can read the answers" not in trained.err
    run = RunFolder.open(Path(json.loads(trained.out)["run_dir"]).absolute())
    assert run.path.is_relative_to(tmp_path)
    rollouts = list(run.rollouts())
    assert len(rollouts) == 4
    for rollout in rollouts:
        assert rollout["info"]["exit_code"] == 0
        seen = rollout["info"]["stderr"]
        assert "of the program" in seen
        assert "red lamp" not in seen
        assert "def even" not in seen
        assert run.path.name not in seen
        assert json.loads(seen)
    assert "red lamp" in cases.read_text()
    assert measure.read_text() == SCORE


def test_without_the_sandbox_it_is_told_at_the_start_which_answers_the_program_can_read(cli, program):
    Path("more.py").write_text("def short(ctx):\n    return len(ctx.program.stdout) < 9\n")
    err = cli.ok("train", *program, "--measure", "more.py:short", *SMALL).err
    (warning,) = (line for line in err.splitlines() if "can read the answers" in line)
    assert "can read the answers in cases.jsonl, score.py, more.py; agent.sandbox hides them" in warning
    assert err.index(warning) < err.index("scoring before")
