"""`palestra init`: write an agent file with a tool, a measure and cases, to start from."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import click

from palestra.core.errors import StateError

dumps = partial(json.dumps, ensure_ascii=False)
_NAME, _MODEL = "stock-clerk", "palestra/tiny"
_COLOURS, _THINGS = "red blue green black white pink", "lamp mug chair pen book clock hat bag"
_INSTRUCTIONS = "Use the tools to answer."


@click.command("init")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), default=".")
@click.option("--name", help=f"Name of the agent; {_NAME} by default.")
@click.option("--model", help=f"Folder, .gguf file or hub id of its model; {_MODEL} (embedded, for a CPU) by default.")
@click.option("--instructions", help="Instructions of the agent, its system message.")
@click.option("--yes", is_flag=True, help="Ask nothing; use the defaults.")
def command(folder: Path, name: str | None, model: str | None, instructions: str | None, yes: bool) -> None:
    """Write an agent to start from into FOLDER (the current one by default).

    \b
    agent.py       the agent, two tools and a measure
    cases.jsonl    a question and the expected answer on each line

    It asks for the agent's name, its model and its instructions, unless options set them. Existing files are kept.
    """
    files = [folder / "agent.py", folder / "cases.jsonl"]
    if existing := [str(file) for file in files if file.exists()]:
        raise StateError(f"{' and '.join(existing)} exist; choose another folder, as in palestra init new_agent")
    from jinja2 import Template  # here: `palestra --help` is fast

    name = _answer(name, "Name of the agent", _NAME, yes)
    model = _answer(model, "Its model (a folder, a .gguf file or a hub id)", _MODEL, yes)
    instructions = _answer(instructions, "Its instructions", _INSTRUCTIONS, yes)
    folder.mkdir(parents=True, exist_ok=True)
    quoted = {"name": dumps(name), "model": dumps(model), "instructions": dumps(instructions)}
    template = Template(Path(__file__).with_name("new_agent.jinja").read_text("utf-8"), trim_blocks=True)
    text = template.render(**quoted, is_tiny=model == _MODEL, colours=_COLOURS, things=_THINGS)
    files[0].write_text(text, encoding="utf-8")
    files[1].write_text("".join(dumps(case) + "\n" for case in _cases()))
    inside = "" if folder == Path(".") else f"cd {folder}\n"
    click.echo(f"wrote {files[0]} and {files[1]}. Next:\n{inside}palestra eval agent.py\npalestra train agent.py")


def _answer(option: str | None, question: str, default: str, yes: bool) -> str:
    if option is not None:
        return option
    return default if yes else str(click.prompt(question, default=default))


def _cases() -> list[dict[str, object]]:
    """Questions about the sum of two items' stock, by the rule of the agent file."""
    colours, things = enumerate(_COLOURS.split()), list(enumerate(_THINGS.split()))
    stock = {f"{c} {t}": 11 + 7 * i + 9 * k for i, c in colours for k, t in things}
    pairs = [(a, b) for a in stock for b in stock if a < b][::8]
    return [{"input": f"How many {a}s and {b}s are in stock?", "expect": stock[a] + stock[b]} for a, b in pairs]
