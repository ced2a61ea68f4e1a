"""What README and docs tell people to type: every command and option exists, every block of Python can be imported."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from pathlib import Path

import click
import pytest

from palestra.core.config import RunConfig
from palestra.faces.cli.main import cli, run

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SETTINGS = {
    f"{section}.{name}" for section, field in RunConfig.model_fields.items()
    for name in getattr(field.annotation, "model_fields", {})
} | set(RunConfig.model_fields)  # fmt: skip


def blocks(page: Path, *languages: str) -> list[str]:
    found = re.findall(r"^( *)```(\w+)\n(.*?)^ *```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [text for _, language, text in found if language in languages]


def commands(page: Path) -> list[list[str]]:
    """The words of each line that starts with `palestra`, lines with a continuation joined, comments left out."""
    lines = [
        line for block in blocks(page, "sh", "bash", "console") for line in block.replace("\\\n", " ").splitlines()
    ]
    words = [shlex.split(re.sub(r"\[([^\]]*)\]", "", line), comments=True) for line in lines if "…" not in line]
    starts = [[w for w in line if not re.fullmatch(r"[A-Z_]+=\S*", w)] for line in words]  # without variables
    return [line for line in starts if line and line[0] == "palestra"]


def unknown_parts(words: list[str]) -> list[str]:
    """What of one command line does not exist."""
    command, rest = cli, words[1:]
    context = click.Context(cli)
    while isinstance(command, click.Group) and rest:
        name, *rest = rest
        if name.startswith("-"):
            return [] if name in {"--help", "--version"} else [name]
        found = [command.get_command(context, one) for one in name.split("|")]
        if None in found:
            return [name]
        command = found[0]
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    given = [word.split("=")[0] for word in rest if word.startswith("--") and word != "--"]
    own = ("env.", "openai.", "section.")
    return [
        name for name in given
        if name not in options and name[2:] not in SETTINGS and not name[2:].startswith(own) and name != "--help"
    ]  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_exists_with_its_options(page: Path) -> None:
    wrong = {" ".join(words): parts for words in commands(page) if (parts := unknown_parts(words))}
    assert wrong == {}


def test_a_command_or_option_that_does_not_exist_is_found() -> None:
    assert unknown_parts(["palestra", "trian", "x.py"]) == ["trian"]
    assert unknown_parts(["palestra", "train", "x.py", "--train.learning_rat=1"]) == ["--train.learning_rat"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_block_of_python_parses_and_imports_names_that_exist(page: Path) -> None:
    for text in blocks(page, "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "palestra":
                module = importlib.import_module(node.module or "")
                missing = [name.name for name in node.names if not hasattr(module, name.name)]
                assert missing == [], f"{node.module} has no {missing}"


def test_the_agent_of_the_tutorial_is_scored_and_trained(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my_agent.py").write_text("\n".join(blocks(ROOT / "docs" / "tutorial.md", "python")))
    assert run(["eval", "my_agent.py"]) == 0
    options = ["--train.max_steps", "1", "--rollout.group_size", "4", "--train.problems_per_step", "2"]
    assert run(["train", "my_agent.py", "--folder", "r", "--rollout.max_new_tokens", "60", *options]) == 0
    assert run(["export", "r", "--to", "hf", "--out", "out"]) == 0
