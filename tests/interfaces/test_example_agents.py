"""The programs of examples/agents whose packages are here, two attempts each: one row an attempt, nothing re-tokenised.

`make test-agents` trains all of them.
"""

import asyncio
import importlib.util
import sys
from pathlib import Path

import pytest

from palestra import demo
from palestra.agents.programs import ProgramLimits, command_agent
from palestra.core.types import SamplingParams
from palestra.envs.suite_env import SuiteEnvironment
from palestra.rollout.collect import Collector
from palestra.servers.gateway.gateway import Gateway
from palestra.servers.openai.inference import load_completer
from palestra.sources.programs.runner import ProgramRunner

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import train_agents

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
PROGRAMS = {
    "openai_chat.py": "openai",
    "openai_responses.py": "openai",
    "anthropic_messages.py": "anthropic",
    "openai_agents.py": "agents",
    "langgraph_agent.py": "langgraph",
    "pydantic_ai_agent.py": "pydantic_ai",
}


@pytest.fixture(scope="module")
def model():
    return load_completer("palestra/tiny")


@pytest.mark.parametrize("file", PROGRAMS)
def test_an_unmodified_program_solves_cases_with_the_model(model, file):
    if importlib.util.find_spec(PROGRAMS[file]) is None:
        pytest.skip(f"{PROGRAMS[file]} is not installed; make test-agents runs {file}")
    environment = SuiteEnvironment(demo.agent, demo.suite)
    agent = command_agent([sys.executable, str(EXAMPLES / file)])
    sampling = SamplingParams(max_new_tokens=120)

    async def run():
        gateway = Gateway(model, sampling)
        limits = ProgramLimits(timeout_s=200)
        runner = ProgramRunner(environment, agent, gateway, sampling, limits, asyncio.Semaphore(2))
        collector = Collector(environment, runner, max_open_episodes=2)
        try:
            return (await collector.collect(environment.problems("train")[2:3], 2, ["0/2"]))[0]
        finally:
            await gateway.close()

    group = asyncio.run(run())
    for rollout in group.rollouts:
        assert rollout.error is None
        assert rollout.info["exit_code"] == 0, rollout.info["stderr"]
        assert set(rollout.tool_names) == {"price", "multiply", "add"}
        assert rollout.messages[0].text == demo.agent.instructions
        assert rollout.scores.keys() == {"right_total"}
    assert group.metrics["agent/rows_per_attempt"] == 1.0
    assert group.metrics["agent/retokenised_turns"] == 0.0


def test_every_example_is_trained_by_make_test_agents():
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file()} - {"shop.py", "catalogue.json", "any_cli.sh"}
    assert {program.file for program in train_agents.PROGRAMS} == files
    package_sets = {*train_agents.VIRTUAL_ENVIRONMENTS, *train_agents.NPM_FOLDERS}
    assert {program.packages for program in train_agents.PROGRAMS} == package_sets


LONG_ROW = {"attempts": 6, "ended": 6, "losses": [0.0, 0.1, -0.2], "rows": 1.0, "retokenised": 0.0}


@pytest.mark.parametrize(
    ("row", "is_good"),
    [
        (LONG_ROW, True),
        ({**LONG_ROW, "retokenised": 1.0}, False),
        ({**LONG_ROW, "ended": 5}, False),
        ({**LONG_ROW, "losses": [0.0, 0.0, 0.0]}, False),
        ({**LONG_ROW, "losses": [0.1]}, False),
        ({"error": "not installed here"}, False),
    ],
)
def test_a_program_passes_if_all_attempts_end_and_three_steps_train_its_own_tokens(row, is_good):
    assert (train_agents.problem(train_agents.LONG, row) == "") == is_good


def test_a_run_of_some_programs_replaces_their_rows_and_keeps_all_else(monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    monkeypatch.setattr(train_agents, "PAGE", page)
    learn, long = train_agents.LEARN, train_agents.LONG
    old = "| openai_chat.py | old |", "| langgraph_agent.py | kept |", "| claude_code.sh | kept |"
    page.write_text(f"# Title\n\n## {long}\n\nText.\n\n{old[2]}\n\n## {learn}\n\nMore.\n\n{old[0]}\n{old[1]}\n")
    row = {"before": 0.3, "after": 0.95, "rows": 1.0, "retokenised": 0.0, "processors": 2, "seconds": 9}
    train_agents.write_page(learn, {"openai_chat.py": row})
    train_agents.write_page(long, {"codex.sh": {"error": "a|b"}})
    text = page.read_text()
    assert old[0] not in text
    assert "| openai_chat.py | OpenAI SDK, Chat Completions | 30.0% | 95.0% | 1.00 | 0 | 2 | 9 |" in text
    assert text.startswith(f"# Title\n\n## {long}\n\nText.\n\n| program |")
    assert f"{old[2]}\n| codex.sh | Codex, `codex exec` | a/b |" in text
    assert f"\n\n## {learn}\n\nMore.\n\n| program |" in text
    assert text.endswith(f"{old[1]}\n")
    whole = [line.count("|") for line in text.splitlines() if line.startswith(("| program", "| codex", "| --- "))]
    assert whole[0] == whole[1] == whole[2]  # every row has all columns
