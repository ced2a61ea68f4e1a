"""`palestra chat` as people and scripts use it."""

import asyncio
import io
import json
import shutil

import pytest
from rich.console import Console

from palestra.cli import chat
from palestra.core.config import RunConfig
from palestra.core.run_folder import RunFolder


@pytest.fixture
def says(monkeypatch):
    def give(*lines):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))

    return give


@pytest.fixture
def run_folder(tmp_path, agent_file, tiny):
    """A run with a trained model, as `palestra train` leaves it."""

    def make(**record):
        told = {"source": str(agent_file()), "instructions": "Use the tools to answer.", "tools": [{}], **record}
        run = RunFolder.create(tmp_path / "runs", "clerk", RunConfig(), told)
        tiny.model.save_pretrained(run.model)
        tiny.tokenizer.save_pretrained(run.model)
        return run

    return make


def test_a_run_is_chatted_with_and_its_tool_calls_are_shown(cli, run_folder):
    run = run_folder()
    for name in (str(run.path), run.path.name, str(run.model)):
        answer = cli.ok("chat", name, "--trust", "--once", "What does a red lamp cost?")
        assert 'calls price(item="red lamp")' in answer.out
        assert "→ 23" in answer.out
        assert "That is 23." in answer.out


def test_scripts_get_a_line_of_json_for_each_answer(cli, agent_file, says):
    says("What does a red lamp cost?", "", "/reset", "What does a blue mug cost?")
    answer = cli("chat", "palestra/tiny", "--agent", str(agent_file()), "--json")
    rows = [json.loads(line) for line in answer.out.splitlines()]
    assert [(row["answer"], row["stop"]) for row in rows] == [("That is 23.", "answered"), ("That is 45.", "answered")]
    assert [message["role"] for message in rows[0]["messages"]] == ["assistant", "tool", "assistant"]
    assert "with the tools price" in answer.err


def test_commands_begin_with_a_slash(cli, agent_file, says):
    says("/help", "/reset", "/quit", "never asked")
    answer = cli("chat", "palestra/tiny", "--agent", str(agent_file()))
    assert answer.code == 0
    assert answer.out.count("/reset starts a new conversation") == 2, "the greeting and /help"
    assert "a new conversation" in answer.out
    assert "never asked" not in answer.out


def test_an_answer_that_is_cut_off_says_so(cli, agent_file):
    answer = cli("chat", "palestra/tiny", "--agent", str(agent_file()), "--once", "hi", "--max-new-tokens", "1")
    assert "cut off" in answer.out


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"source": "/no/such/agent.py"}, ("without tools", "no agent file")),
        pytest.param(
            {"environment": {"name": "calculator", "settings": {}}}, ("with the tools",), marks=pytest.mark.extras
        ),
    ],
)
def test_tools_are_those_of_the_environment_and_missing_ones_are_told(cli, run_folder, says, record, words):
    says("/quit")
    answer = cli.ok("chat", str(run_folder(**record).path))
    assert all(word in answer.out for word in words)


def test_a_run_without_a_model_and_a_model_that_is_none_are_named(cli, run_folder):
    run = run_folder()
    shutil.rmtree(run.model)
    assert "has no trained model and no checkpoint yet" in cli("chat", str(run.path)).err
    assert "there is no folder" in cli("chat", "./nothing/here").err


def test_on_a_terminal_an_answer_is_seen_while_it_is_written():
    class WritingSession:
        so_far = ""

        async def say(self, text, on_message):
            self.so_far = "one two [bold]three\nfour"
            await asyncio.sleep(0.3)
            return "answered"

    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=24)
    with asyncio.Runner() as runner:
        chat._answer(runner, WritingSession(), "count", chat._as_text(console))
    assert "…wo [bold]three four" in screen.getvalue()
