import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from palestra.cli.main import run

AGENT_FILE = '''
from palestra import Agent, EvalSuite, function_tool, measure

PRICES = {"red lamp": 23, "blue mug": 45, "green chair": 67, "black desk": 89, "white pen": 12}


@function_tool
def price(item: str) -> int:
    """Look up the price of one item."""
    return PRICES[item]


@measure
def right_price(ctx):
    return str(ctx.expect) in ctx.final_assistant_message.text


agent = Agent("clerk", "palestra/tiny", "Use the tools to answer.", [price])
suite = EvalSuite.from_records(
    [{"input": f"What does a {item} cost?", "expect": cost} for item, cost in PRICES.items()], measures=[right_price]
)
config = {"rollout.max_new_tokens": 40, "rollout.group_size": 2, "train.problems_per_step": 2, "train.max_steps": 1}
'''


class Answer(NamedTuple):
    """What a command line came to."""

    code: int
    out: str
    err: str


Cli = Callable[..., Answer]
AgentFile = Callable[..., Path]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs `palestra …` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("PALESTRA_DEBUG", "0")

    def call(*arguments: str) -> Answer:
        capsys.readouterr()
        code = run(arguments)
        return Answer(code, *capsys.readouterr())

    return call


@pytest.fixture
def agent_file(tmp_path: Path) -> AgentFile:
    """Writes my_agent.py: a good one, after replacements, and with more code at its end."""

    def write(*replacements: tuple[str, str], more: str = "") -> Path:
        text = AGENT_FILE
        for old, new in replacements:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "my_agent.py"
        path.write_text(text + textwrap.dedent(more))
        return path

    return write
