import contextlib
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from doc_pages import ROOT, blocks

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


class Cli:
    """Runs `palestra …`."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> Answer:
        self._capsys.readouterr()
        code = run(arguments)
        return Answer(code, *self._capsys.readouterr())

    def ok(self, *arguments: str) -> Answer:
        """The answer of a command that succeeds."""
        answer = self(*arguments)
        assert answer.code == 0, answer.err
        return answer

    def json(self, *arguments: str) -> Any:
        """The last line of a command that succeeds, which is JSON."""
        return json.loads(self.ok(*arguments, "--json").out.splitlines()[-1])

    def error(self, *arguments: str) -> str:
        """What a command says that rejects its input."""
        answer = self(*arguments)
        assert answer.code == 2, answer.out + answer.err
        assert "Traceback" not in answer.err
        return answer.err


AgentFile = Callable[..., Path]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """The command line in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("PALESTRA_DEBUG", "0")
    return Cli(capsys)


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


@pytest.fixture(scope="module")
def docs_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the docs name: the tutorial's agent, scored, and trained for a step in two runs."""
    folder = tmp_path_factory.mktemp("docs")
    options = ["--train.max_steps", "1", "--rollout.group_size", "2", "--train.problems_per_step", "1"]
    limits = ["--rollout.max_new_tokens", "30", "--eval.cases", "1"]
    messages = [{"role": "user", "content": "What is 3 + 4?"}, {"role": "assistant", "content": "It is 7."}]
    with contextlib.chdir(folder):
        tutorial = blocks(ROOT / "docs" / "tutorial.md", "python")
        Path("my_agent.py").write_text("\n".join(block.text for block in tutorial))
        Path("my_env.py").write_text(blocks(ROOT / "docs" / "environments.md", "python")[0].text)
        Path("traces.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
        assert run(["eval", "my_agent.py", "--eval.cases", "2", "--rollout.max_new_tokens", "30"]) == 0
        for name in ("stock-clerk-1", "stock-clerk-2"):
            assert run(["train", "my_agent.py", "--folder", f"runs/{name}", *options, *limits]) == 0
    return folder
