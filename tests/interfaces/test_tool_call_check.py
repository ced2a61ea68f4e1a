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
    answer = cli(*command)
    assert answer.code == 2, answer.out + answer.err
    for words in ("hermes", "not valid JSON", "chat_template"):
        assert words in answer.err


def test_an_agent_without_tools_trains_on_such_a_model(cli, agent_file, broken_model):
    agent_file(('"Use the tools to answer.", [price]', '"Answer.", []'))
    answer = cli("train", "my_agent.py", "--model.name", "broken")
    assert answer.code == 0, answer.err


def test_doctor_checks_the_tool_calls_of_a_model(cli, broken_model):
    answer = cli("doctor", "--model", "palestra/tiny", "--json")
    assert answer.code == 0, answer.err
    assert [(row["name"], row["state"]) for row in json.loads(answer.out)["findings"]] == [
        ("chat template", "ok"),
        ("tool calls", "ok"),
    ]
    answer = cli("doctor", "--model", "broken", "--json")
    assert answer.code == 1
    row = json.loads(answer.out)["findings"][-1]
    assert (row["state"], row["found"]) == ("broken", "format hermes")
    assert "not valid JSON" in row["remedy"]


def test_doctor_names_a_model_that_is_not_there(cli):
    answer = cli("doctor", "--model", "no/such-folder-here", "--json")
    assert answer.code == 1
    assert json.loads(answer.out)["findings"][0]["state"] == "broken"
