"""`palestra rescore`: stored rollouts by changed measures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from palestra.agent_source import load_agent_file
from palestra.cli.common import PATH, returns_data_at_end, table
from palestra.cli.find_run import code_for_tools, require_run, require_trust, run_argument, trust_option
from palestra.core.errors import InputError, NotFoundError, SettingError
from palestra.core.files import import_file, read_jsonl
from palestra.core.run_folder import RunFolder
from palestra.core.text import visible
from palestra.core.types import Problem
from palestra.envs.base import Split
from palestra.envs.discover import load_env
from palestra.evals.measures import Measure, as_measures
from palestra.evals.suite import hold_out
from palestra.extras.rescore.rescore import rescore
from palestra.train.progress import task


@click.command("rescore")
@run_argument()
@click.option("--measures", "file", required=True, type=PATH, metavar="FILE", help="With @measure.")
@click.option("--kind", default="train", show_default=True, help="train, before, after, or the step of an evaluation.")
@click.option("--limit", type=click.IntRange(1), help="Only the first rollouts.")
@click.option("--agent", "agent_file", metavar="FILE", help="Where the cases are. [default: the run's own]")
@trust_option
@returns_data_at_end
def command(
    run: str, file: Path, kind: str, limit: int | None, agent_file: str | None, trust: bool, console: Console
) -> dict[str, Any]:
    """Score the stored rollouts of a run with changed measures, and compare with the stored scores.

    \b
    palestra rescore k3f9 --measures stricter.py
    palestra rescore runs/my-agent-20260131-101500 --measures my_agent.py --kind after
    """
    folder = require_run(run)
    if agent_file is None:
        require_trust(folder, code_for_tools(folder.record), trust)
    if not file.is_file():
        raise NotFoundError(f"there is no file {file}; give a Python file with functions that have @measure")
    module = import_file(file.resolve(), str(file), "It declares measures with @measure")
    declared = {value.name: value for value in vars(module).values() if isinstance(value, Measure)}
    measures = as_measures(getattr(module, "measures", None) or list(declared.values()))
    if not measures:
        raise InputError(f"{file} declares no measure; write a function with @measure above it")
    files = {str(name): folder.eval_file(name) for name in folder.eval_names()}
    files |= {"train": folder.rollouts_file} if folder.rollouts_file.is_file() else {}
    if kind not in files:
        raise NotFoundError(f"{folder.path} has no rollouts of the kind {kind!r}; it has {', '.join(files) or 'none'}")
    problems = _problems_of(folder, "train" if kind == "train" else "held_out", agent_file)
    with task(console, "scoring", unit="rollouts") as phase:
        rescored = rescore(read_jsonl(files[kind]), measures, problems, limit=limit, on_progress=phase.advance)
    _print_rescored(console, rescored)
    return rescored


def _problems_of(folder: RunFolder, split: Split, agent_file: str | None) -> Mapping[str, Problem]:
    """The problems by id, for what they expect: of the agent file or the environment that the run was trained on."""
    if agent_file is None and (environment := folder.environment()):
        return {problem.id: problem for problem in load_env(*environment).problems(split)}
    source = agent_file or folder.record.get("source")
    if source is None:
        raise SettingError(f"{folder.path} was started from Python: name the file with its cases by --agent FILE")
    file = load_agent_file(None if source == "demo" else str(source))
    trained, held_out = hold_out(file.suite, file.held_out)
    cases = trained if split == "train" or held_out is None else held_out
    return {case.own_id: case for case in cases} | {case.id: case for case in cases}  # old runs have their own ids


def _print_rescored(console: Console, rescored: Mapping[str, Any]) -> None:
    rows = [
        (visible(row["name"]), _rate(row["old"]), _rate(row["new"]), str(row["changed"]), str(row["new"]["errors"]))
        for row in rescored["measures"]
    ]
    console.print(table(("measure", "then", "now", "changed", "errors"), rows, box=None, pad_edge=False))
    for row in rescored["changed"][:3]:
        old, new = (visible(f"{row[when]['value']:g} {row[when]['reason']}".strip()) for when in ("old", "new"))
        console.print(f"step {row['step']}, {visible(row['problem_id'])}: {old} → {new}", highlight=False, markup=False)
    if rescored["without_problem"]:
        console.print(f"{rescored['without_problem']} rollouts are of problems that are not known here: expect is None")


def _rate(row: Mapping[str, float | None] | None) -> str:
    if row is None or row["mean"] is None:
        return "–"
    return f"{row['mean']:.4g}" if row["pass_rate"] is None else f"{row['pass_rate']:.1%}"
