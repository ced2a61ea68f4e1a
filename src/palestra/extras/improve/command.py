"""`palestra improve my_agent.py`: better instructions and tool descriptions, without training."""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from palestra.agent_source import DEMO, AgentFile, AgentOptions
from palestra.agents.programs import ProgramAgent
from palestra.agents.texts import write_texts
from palestra.cli import settings
from palestra.cli.common import PATH, load_libraries
from palestra.cli.find_run import with_model_of_run
from palestra.cli.train import train_in_terminal
from palestra.core.chat_model import POLICY
from palestra.core.errors import SettingError, UnsupportedError
from palestra.core.files import write_jsonl
from palestra.core.text import visible
from palestra.evals.report import compare
from palestra.extras.improve.improve import Improvement, edit_source, improve
from palestra.runs.request import RunRequest


@settings.command_of_run("improve")
@click.argument("agent_file", required=False)
@click.option(
    "--reflect",
    default=POLICY,
    show_default=True,
    metavar="MODEL",
    help="Who rewrites texts: a model at --reflect-url, a local one (local/NAME, a folder), or policy: its own model.",
)
@click.option(
    "--reflect-url", "base_url", metavar="URL", help="OpenAI-style endpoint. [default: OPENAI_BASE_URL or OpenAI]"
)
@click.option(
    "--reflect-key-env", "api_key_env", default="OPENAI_API_KEY", show_default=True, help="The variable with its key."
)
@click.option("--agent-url", metavar="URL", help="The agent's model is one at this endpoint, not of this machine.")
@click.option("--agent-key-env", default="OPENAI_API_KEY", show_default=True, help="The variable with its key.")
@click.option("--max-calls", type=click.IntRange(1), help="Requests to the reflector.")
@click.option("--budget", default=300, show_default=True, type=click.IntRange(1, 1_000_000), help="Attempts in all.")
@click.option("--minibatch", default=4, show_default=True, type=click.IntRange(1, 1000), help="Attempts a reflection.")
@click.option(
    "--pareto-cases", default=24, show_default=True, type=click.IntRange(1, 100_000), help="Cases to compare texts on."
)
@click.option("--merges", hidden=True)  # removed
@click.option(
    "--only", multiple=True, metavar="TEXT", help="Change only this: instructions or 'tool NAME'; repeatable."
)
@click.option("--out", type=PATH, help="Folder for the result. [default: a new one in ./runs]")
@click.option("--write", is_flag=True, help="Also write the texts into AGENT_FILE itself.")
@click.option("--then-train", is_flag=True, help="Go on with a training of the improved agent.")
def command(
    agent_file: str | None,
    agent_url: str | None,
    max_calls: int | None,
    only: tuple[str, ...],
    out: Path | None,
    write: bool,
    then_train: bool,
    config_file: Path | None,
    console: Console,
    **parameters: Any,
) -> Iterator[dict[str, Any]]:
    """Evolve an agent's instructions and tool descriptions by reflection on what its measures say (GEPA).

    The weights stay as they are. The result is scored on the held-out cases, and written as improved.json and
    improved.diff; `palestra train AGENT_FILE --improved improved.json` (and eval) use it.

    \b
    palestra improve my_agent.py
    palestra improve my_agent.py --reflect gpt-5-mini --budget 500
    palestra improve my_agent.py --reflect qwen3:32b --reflect-url http://localhost:11434/v1 --then-train
    """
    models = ("reflect", "base_url", "api_key_env", "agent_key_env")
    chosen = (*models, "budget", "minibatch", "pareto_cases")
    search: dict[str, Any] = {name: parameters.pop(name) for name in chosen}
    limits = {"max_calls": max_calls, "merges": parameters.pop("merges")}
    search |= {name: value for name, value in limits.items() if value is not None}
    options = settings.from_options(parameters)
    if agent_url is None:  # a name at an endpoint is not one of a run here
        options = with_model_of_run(options)
    layer = settings.layer(config_file, options)
    file, agent, config = AgentOptions().open(agent_file, layer)
    if isinstance(agent, ProgramAgent) or (write and file.source == DEMO):
        raise UnsupportedError("improve changes agents of our own loop, and --write their file; the demo has none")
    if then_train and agent_url:
        raise SettingError("--then-train needs a model of this machine; --agent-url names one elsewhere")
    if agent_url is None:
        load_libraries(console, config.model.name)
    done = improve(
        agent,
        file.suite,
        file.measures,
        agent_url=agent_url,
        components=only or None,
        held_out=file.held_out,
        config=config,
        reward_weights=file.reward_weights,
        on_event=lambda text: console.print(visible(text), style="dim", highlight=False, markup=False),
        **search,
    )
    folder = out or Path(config.output_dir) / f"{agent.name}-improved-{time.strftime('%Y%m%d-%H%M%S')}"
    unplaced = _write(folder, file, done, write=write)
    _print(console, folder, done, unplaced if write else [])
    yield done.to_dict() | {"folder": str(folder)}
    if then_train:
        improved = AgentOptions.take({"improved": folder / "improved.json"})
        yield train_in_terminal(RunRequest(agent_file=agent_file, agent=improved.record(), settings=layer), console)


def _write(folder: Path, file: AgentFile, done: Improvement, *, write: bool) -> list[str]:
    """The files of the result; components that could not be placed in the agent's file."""
    folder.mkdir(parents=True, exist_ok=True)
    write_texts(folder / "improved.json", done.texts)
    (folder / "report.json").write_text(json.dumps(done.to_dict(), indent=2) + "\n", encoding="utf-8")
    rows = [{"number": c.number, "parents": c.parents, "scores": c.scores, "texts": c.texts} for c in done.candidates]
    write_jsonl(folder / "candidates.jsonl", rows)
    diff, unplaced = done.diff, list[str]()
    if file.source and file.source != DEMO and done.changed:
        source = Path(file.source).read_text(encoding="utf-8")
        edited, unplaced = edit_source(source, done.before_texts, done.texts)
        if not unplaced:
            name, old, new = Path(file.source).name, source.splitlines(), edited.splitlines()
            diff = "\n".join(difflib.unified_diff(old, new, f"a/{name}", f"b/{name}", lineterm="")) + "\n"
        if write:
            Path(file.source).write_text(edited, encoding="utf-8")
    (folder / "improved.diff").write_text(diff, encoding="utf-8")
    return unplaced


def _print(console: Console, folder: Path, done: Improvement, unplaced: list[str]) -> None:
    cases = "held-out cases" if done.after.split == "held_out" else "training cases (none are held out)"
    table = Table("measure", "before", "after", box=None, pad_edge=False, title=f"{done.after.pass_rate.n} {cases}")
    for row in compare(done.before, done.after):
        table.add_row(visible(row.name), str(row.before), str(row.after))
    console.print(table)
    used = done.reflections
    console.print(
        f"{len(done.candidates)} candidates, {done.attempts} attempts, {used['calls']:.0f} reflections "
        f"({used['tokens']:.0f} tokens); changed: {', '.join(done.changed) or 'nothing'}",
        highlight=False,
        markup=False,
    )
    if not done.changed and all(candidate.mean <= 0 for candidate in done.candidates):
        console.print(
            "no attempt earned a reward, so no text was better than another; begin with a warm start (palestra train "
            "AGENT_FILE --warm-start auto), or let a stronger model rewrite (--reflect)",
            highlight=False,
            markup=False,
        )
    if unplaced:
        console.print(f"not found in the file, so not written there: {', '.join(unplaced)}", markup=False)
    console.print(f"{folder}/improved.json, improved.diff", highlight=False, markup=False)
