"""A model whose chat template writes tool calls that cannot be read is rejected when a command starts."""

import json
import shutil
from importlib import resources
from pathlib import Path

import pytest


@pytest.fixture
def broken_model(tmp_path: Path) -> Path:
    """The embedded model with a template that writes calls as no parser reads them."""
    folder = tmp_path / "broken"
    with resources.as_file(resources.files("palestra.models") / "tiny") as tiny:
        shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    template = folder / "chat_template.jinja"
    written = template.read_text()
    template.write_text(written.replace('"<tool_call>\\n" ~', '"<tool_call>\\n!" ~'))
    assert template.read_text() != written
    return folder


@pytest.mark.parametrize(
    "command",
    [
        ("train", "my_agent.py", "--model.name", "broken"),
        ("eval", "my_agent.py", "--model.name", "broken"),
        ("chat", "broken", "--agent", "my_agent.py", "--once", "hi"),
        ("serve", "broken", "--port", "0"),
        ("gateway", "broken", "--out", "rollouts.jsonl", "--port", "0"),
    ],
    ids=lambda command: command[0],
)
def test_a_model_with_unreadable_calls_is_rejected_with_format_and_remedy(cli, agent_file, broken_model, command):
    agent_file()
    said = cli.error(*command)
    assert all(words in said for words in ("hermes", "not valid JSON", "chat_template")), said


def test_an_agent_without_tools_trains_on_such_a_model(cli, agent_file, broken_model):
    agent_file(('"Use the tools to answer.", [price]', '"Answer.", []'))
    cli.ok("train", "my_agent.py", "--model.name", "broken")


@pytest.mark.parametrize(
    ("model", "states", "remedy"),
    [
        ("palestra/tiny", ["ok", "ok"], ""),
        ("broken", ["ok", "broken"], "not valid JSON"),
        ("no/such-folder-here", ["broken"], "no/such-folder-here"),
    ],
)
def test_doctor_checks_the_tool_calls_of_a_model(cli, broken_model, model, states, remedy):
    answer = cli("doctor", "--model", model, "--json")
    rows = json.loads(answer.out)["findings"]
    assert (answer.code, [row["state"] for row in rows]) == (int("broken" in states), states)
    assert remedy in rows[-1]["remedy"]
