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
from palestra.servers.gateway.gateway import Gateway
from palestra.servers.openai.loading import load_completer
from palestra.sources.programs.collector import ProgramCollector

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
        limits = ProgramLimits(timeout_s=200, fork_server=True)
        collector = ProgramCollector(environment, agent, gateway, sampling, limits, 2, asyncio.Semaphore(2))
        try:
            return (await collector.collect(environment.problems("train")[2:3], 2, ["0/2"]))[0]
        finally:
            await agent.close()
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
