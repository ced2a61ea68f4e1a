"""What README and docs tell people to type: their code blocks, and the commands in them and in the text."""

import ast
import importlib
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click

from palestra.cli import settings
from palestra.cli.main import cli
from palestra.core.config import TRANSLATIONS, RunConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
_BLOCK = re.compile(r"^( *)(`{3,})(\w*)\n(.*?)^ *\2`*[ ]*$", re.DOTALL | re.MULTILINE)
_NOT_RUN = re.compile(r"<!-- not run: (.+?) -->\s*\Z")  # right before a block: why no test can run it
_COMMENT = re.compile(r"(^|\s)#\s.*$")
_VARIABLE = re.compile(r"[A-Z_]+=\S*$")
_TORCHRUN = re.compile(r"torchrun .* -m palestra ")


class Block(NamedTuple):
    language: str
    text: str
    not_run: str  # the reason, or ""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> list[Block]:
    """The code blocks of a page, of these languages (default all)."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        reason = _NOT_RUN.search(text[: match.start()])
        found.append(Block(match[3], match[4], reason[1] if reason else ""))
    return [block for block in found if not languages or block.language in languages]


def shell_lines(page: Path) -> list[str]:
    """The lines of a page's shell blocks without comments; an indented line of options belongs to the command above."""
    found: list[str] = []
    command = ""
    for block in blocks(page, "sh", "bash", "console"):
        for raw in block.text.replace("\\\n", " ").splitlines():
            line = _COMMENT.sub("", raw).rstrip()
            is_option = line.startswith((" ", "…")) and line.strip().startswith("--")
            if line and not is_option:
                command = line
            if line.strip():
                found.append(f"{command} {line.strip()}" if is_option else line.strip())
    return found


def palestra_command(line: str) -> str | None:
    """What follows `palestra` in a line of a shell, also behind variables and torchrun; None if it is another command.

    >>> palestra_command("CUDA_VISIBLE_DEVICES=1 palestra serve RUN")
    'serve RUN'
    """
    while (first := line.partition(" "))[0] and _VARIABLE.match(first[0]):
        line = first[2].strip()
    line = _TORCHRUN.sub("palestra ", line)
    return line.removeprefix("palestra").strip() if re.match(r"palestra( |$)", line) else None


def mentioned_commands(page: Path) -> list[str]:
    """Commands in the text of a page: `palestra …` in backticks."""
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    return [" ".join(found.split()) for found in re.findall(r"`palestra ([^`]+)`", text)]


def mentioned_options(page: Path) -> list[str]:
    """Options in the text of a page that are not in a command of another program: `--option …` in backticks."""
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    return re.findall(r"`(--[\w.-]+)", text)


def mentioned_settings(page: Path) -> list[str]:
    """Names in the text of a page that look like a setting and are none: `train.…` in backticks."""
    sections = {name for name, field in RunConfig.model_fields.items() if hasattr(field.annotation, "model_fields")}
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    names = re.findall(rf"`(?:--)?((?:{'|'.join(sections)})\.(?!py\b|js\b)[a-z][a-z0-9_]*)(?![\w./(])", text)
    return [name for name in names if name not in {*RunConfig.settings(), *TRANSLATIONS}]


def find_command(words: list[str]) -> tuple[click.Command, list[str], str]:
    """The command that `words` begin with, its arguments, and the name that does not exist, or "".

    `list|watch|…` is each of them.
    """
    command: click.Command = cli
    context = click.Context(cli)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, *words = words
        for one in name.split("|"):
            if one != "…":
                found = command.get_command(context, one)
                if found is None:
                    return command, words, one
                chosen = found
        command = chosen
    return command, words, ""


def unknown_parts(line: str) -> list[str]:
    """Commands and options of a line that do not exist; for a line that need not be complete."""
    command, words, unknown = find_command(shlex.split(re.sub(r"[\[\]]", "", line)))
    if unknown:
        return [unknown]
    names = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    free = ("--env.", "--openai.") if isinstance(command, settings.EnvCommand) else ()
    given = [word.split("=")[0] for word in words if word.startswith("--") and word != "--"]
    allowed = {"--help", "--version", "--section.key"}
    return [name for name in given if name not in names | allowed and not name.startswith(free or ("\0",))]


def parse(line: str) -> click.Context:
    """A complete line as its command reads it, without running it: options, types, arguments, values of settings."""
    command, words, unknown = find_command(shlex.split(line))
    if unknown:
        raise click.UsageError(f"there is no command {unknown}")
    context = command.make_context(command.name, list(words))
    if isinstance(command, settings.EnvCommand) or any(p.name == "train__max_steps" for p in command.params):
        RunConfig.build(settings.from_options(context.params))
    return context


def all_options() -> set[str]:
    """The options of all commands."""

    def walk(command: click.Command) -> Iterator[str]:
        for parameter in command.params:
            yield from (*parameter.opts, *parameter.secondary_opts)
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                yield from walk(command.get_command(context, name) or command)

    return {*walk(cli), "--help"}


def wrong_names(text: str) -> list[str]:
    """Names of palestra in a block of Python that do not exist, and arguments that they do not take."""
    known: dict[str, Any] = {}
    wrong = []
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "palestra":
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                if not hasattr(module, alias.name):
                    wrong.append(f"{node.module}.{alias.name}")
                known[alias.asname or alias.name] = getattr(module, alias.name, None)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and callable(known.get(node.func.id)):
            made = known[node.func.id]
            parameters = inspect.signature(made.__init__ if isinstance(made, type) else made).parameters
            if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                wrong += [f"{node.func.id}({k.arg}=)" for k in node.keywords if k.arg and k.arg not in parameters]
    return wrong
