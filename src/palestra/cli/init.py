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
_AGENT = '''"""Train this agent with `palestra train agent.py`. Replace tools, measure and cases.jsonl by your own."""

from pathlib import Path

from palestra import Agent, EvalSuite, fail_reason, function_tool, measure, pass_reason

COLOURS, THINGS = "{colours}".split(), "{things}".split()
STOCK = {{f"{{c}} {{t}}": 11 + 7 * i + 9 * k for i, c in enumerate(COLOURS) for k, t in enumerate(THINGS)}}


@function_tool
def stock(item: str) -> int:
    """Look up the stock of an item."""  # the model reads the docstring and the types
    return STOCK[item.removesuffix("s")]


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@measure
def right_count(ctx):
    """Good or bad, and why: the reasons are shown in the report, and help a model that learns from its mistakes."""
    said = ctx.final_assistant_message.text
    return pass_reason("right") if f" {{ctx.expect}}." in said else fail_reason(f"not {{ctx.expect}}: {{said}}")


agent = Agent(
    {name},
    model={model},
    instructions={instructions},
    tools=[stock, add],
)
suite = EvalSuite.from_jsonl(Path(__file__).with_name("cases.jsonl"), measures=[right_count])
{config}'''
_CONFIG = """config = {  # suits a small model on a laptop; leave it out for others
    "train.max_steps": 15,
    "train.problems_per_step": 4,
    "rollout.group_size": 8,
    "rollout.max_new_tokens": 80,
}
"""


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
    name = _answer(name, "Name of the agent", _NAME, yes)
    model = _answer(model, "Its model (a folder, a .gguf file or a hub id)", _MODEL, yes)
    instructions = _answer(instructions, "Its instructions", _INSTRUCTIONS, yes)
    config = _CONFIG if model == _MODEL else ""
    folder.mkdir(parents=True, exist_ok=True)
    quoted = {"name": dumps(name), "model": dumps(model), "instructions": dumps(instructions)}
    text = _AGENT.format(**quoted, config=config, colours=_COLOURS, things=_THINGS)
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
