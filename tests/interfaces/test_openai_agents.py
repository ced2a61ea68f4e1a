"""An agent written with the real openai-agents SDK: trained unchanged, and run unchanged with the trained model."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from palestra.agents.tools.tool import as_tool
from palestra.cli.main import run
from palestra.core.files import import_file
from palestra.servers.gateway.request import function_tool

sdk = pytest.importorskip("agents", reason="pip install openai-agents")

EXAMPLE = Path(__file__).parents[2] / "examples" / "openai_agents_sdk.py"
BRIEFLY = (
    "--train.max_steps 1 --train.problems_per_step 2 --rollout.group_size 2 --eval.cases 2 --train.learning_rate 1e-5"
).split()


@pytest.fixture(scope="module")
def url(forkserver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The example's agent after a short training, served."""
    folder = tmp_path_factory.mktemp("sdk")
    assert run(["train", str(EXAMPLE), *BRIEFLY, "--output_dir", str(folder / "runs")]) == 0
    (trained,) = (folder / "runs").glob("*/run.json")
    words = ("serve", trained.parent.name, "--port", "0")
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = forkserver.popen("-m", "palestra", *words, stdout=subprocess.PIPE, text=True, env=env, cwd=folder)
    assert process.stdout is not None
    yield process.stdout.readline().split()[-1]
    process.send_signal(signal.SIGTERM)
    process.wait(20)


@pytest.fixture(scope="module")
def example():
    return import_file(EXAMPLE, str(EXAMPLE), "the example")


def test_the_trained_model_calls_the_agents_tools_in_the_sdks_own_loop(url, example):
    assert example.ask(url, "How many red lamps are in stock?") == f"There are {example.STOCK['red lamp']}."


def test_the_sdk_streams_the_same_answer(url, example):
    from openai import AsyncOpenAI

    model = sdk.OpenAIChatCompletionsModel("any", AsyncOpenAI(base_url=url, api_key="none"))
    agent = example.agent.clone(model=model, model_settings=sdk.ModelSettings(temperature=0))

    async def answer():
        result = sdk.Runner.run_streamed(agent, "How many red lamps are in stock?", run_config=QUIET)
        kinds = [event.item.type async for event in result.stream_events() if event.type == "run_item_stream_event"]
        return kinds, result.final_output

    kinds, said = asyncio.run(answer())
    assert kinds == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    assert str(example.STOCK["red lamp"]) in said


QUIET = sdk.RunConfig(tracing_disabled=True)


def test_the_model_sees_tools_in_the_sdks_requests_as_it_saw_them_in_training(example):
    from agents.models.chatcmpl_converter import Converter

    for tool in example.agent.tools:
        sent = Converter.tool_to_openai(tool)
        assert "strict" in sent["function"], "more than the model was shown"
        assert function_tool(sent) == as_tool(tool).schema
