"""`palestra eval`: score an agent, without training; `palestra rescore`: stored rollouts by changed measures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from palestra.agent_source import AgentFile, AgentOptions, load_agent_file
from palestra.agents.programs import ProgramAgent
from palestra.api import evaluate
from palestra.cli import settings
from palestra.cli.common import PATH, agent_options, load_libraries, out_option, returns_data_at_end, table
from palestra.cli.find_run import (
    code_for_tools,
    require_run,
    require_trust,
    run_argument,
    trust_option,
    with_model_of_run,
)
from palestra.cli.summary import capability_of, print_evaluation
from palestra.core.errors import InputError, NotFoundError, SettingError
from palestra.core.files import import_file, read_jsonl
from palestra.core.run_folder import RunFolder
from palestra.core.show import visible
from palestra.core.types import Problem
from palestra.envs.load import load_env
from palestra.evals.evidence import RunFacts
from palestra.evals.measures import Measure, as_measures
from palestra.evals.suite import EvalSuite, hold_out
from palestra.rollout.rescore import rescore
from palestra.train.progress import make_display, task


@settings.command_of_run("eval")
@click.argument("agent_file", required=False)
@click.option(
    "--split",
    type=click.Choice(["held-out", "train", "all"]),
    default="held-out",
    show_default=True,
    help="Which cases: those that training holds out, those that it trains on, or all.",
)
@out_option("Write each attempt as a JSON line when it ends, so that the evaluation can be resumed.")
@click.option("--resume", is_flag=True, help="Continue the evaluation in the file of --out; its attempts are kept.")
@agent_options
def command(
    agent_file: str | None,
    split: str,
    out: Path | None,
    resume: bool,
    config_file: Path | None,
    console: Console,
    **parameters: Any,
) -> dict[str, Any]:
    """Score an agent on its held-out cases, without training.

    \b
    Examples:
      palestra eval
      palestra eval my_agent.py
      palestra eval my_agent.py --model.name k3f9      the model of a run: its id, name or folder; k3f9@50: a checkpoint
      palestra eval --agent-cmd "python my_agent.py" --cases cases.jsonl --measure score.py:score
      palestra eval my_agent.py --eval.samples_per_case 4 --eval.temperature 0.8
      palestra eval my_agent.py --out scores.jsonl              then, after an interruption, with --resume

    `palestra config --keys` lists every setting.
    """
    if resume and out is None:
        raise SettingError("--resume needs the file of the evaluation: --out FILE --resume")
    own = AgentOptions.take(parameters)
    options = with_model_of_run(settings.from_options(parameters))
    file, agent, config = own.open(agent_file, settings.layer(config_file, options))
    suite, cases, split = _cases(file, split)
    load_libraries(console, config.model.name)
    measures = file.suite.measures if file.measures is None else file.measures  # for held-out cases, too
    how: dict[str, Any] = {"reward_weights": file.reward_weights, "out": out, "resume": resume}
    with make_display(console, config.track.log_every) as display:
        report = evaluate(agent, suite, measures, config=config, watcher=display, **how)
    facts = RunFacts(config, "program" if isinstance(agent, ProgramAgent) else "agent")
    print_evaluation(console, f"{agent.name}, {cases}", report, facts)
    return {
        "pass_rate": report.pass_rate.rate,
        "interval": [report.pass_rate.low, report.pass_rate.high],
        "measures": {m.name: m.pass_rate.rate for m in report.measures},
        "capability": capability_of(report).to_dict(),
        "split": split,
        "cases": len({rollout.problem_id for rollout in report.rollouts}),
        "seconds": round(report.seconds, 2),
    }


def _cases(file: AgentFile, split: str) -> tuple[EvalSuite, str, str]:
    """The cases of a split, how they are called, and the split that they are; a share is split off as in training."""
    train, held = hold_out(file.suite, file.held_out)
    if split == "held-out" and held is not None:
        return held, f"{len(held)} held-out cases (--split all: also the {len(train)} trained on)", split
    if split != "all":
        none = "" if split == "train" else "; none are held out"
        return train, f"the {len(train)} cases that are trained on{none}", "train"
    apart = f", {len(train)} of them trained on" if len(train) < len(file.suite) else ", which are trained on"
    return file.suite, f"all {len(file.suite)} cases of the suite{apart}", split


@click.command("rescore")
@run_argument()
@click.option("--measures", "file", required=True, type=PATH, metavar="FILE", help="With @measure.")
@click.option("--kind", default="train", show_default=True, help="train, before, after, or the step of an evaluation.")
@click.option("--limit", type=click.IntRange(1), help="Only the first rollouts.")
@click.option("--agent", "agent_file", metavar="FILE", help="Where the cases are. [default: the run's own]")
@trust_option
@returns_data_at_end
def rescore_command(
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


def _problems_of(folder: RunFolder, split: str, agent_file: str | None) -> Mapping[str, Problem]:
    """The problems by id, for what they expect: of the agent file or the environment that the run was trained on."""
    record = folder.record
    if agent_file is None and (environment := folder.environment()):
        env = load_env(*environment)
        return {problem.id: problem for problem in env.problems(split)}  # type: ignore[arg-type]
    source = agent_file or record.get("source")
    if source is None:
        raise SettingError(f"{folder.path} was started from Python: name the file with its cases by --agent FILE")
    file = load_agent_file(None if source == "demo" else str(source))
    trained, held_out = hold_out(file.suite, file.held_out)
    cases = trained if split == "train" or held_out is None else held_out
    return {case.own_id: case for case in cases} | {case.id: case for case in cases}  # old runs have their own ids


def _print_rescored(console: Console, rescored: Mapping[str, Any]) -> None:
    rows = []
    for row in rescored["measures"]:
        old = "–" if row["old"] is None else _rate(row["old"])
        rows.append((visible(row["name"]), old, _rate(row["new"]), str(row["changed"]), str(row["new"]["errors"])))
    console.print(table(("measure", "then", "now", "changed", "errors"), rows, box=None, pad_edge=False))
    for row in rescored["changed"][:3]:
        old, new = (visible(f"{row[when]['value']:g} {row[when]['reason']}".strip()) for when in ("old", "new"))
        console.print(f"step {row['step']}, {visible(row['problem_id'])}: {old} → {new}", highlight=False, markup=False)
    if rescored["without_problem"]:
        console.print(f"{rescored['without_problem']} rollouts are of problems that are not known here: expect is None")


def _rate(row: Mapping[str, float | None]) -> str:
    value = row["pass_rate"] if row["pass_rate"] is not None else row["mean"]
    return "–" if value is None else f"{value:.1%}" if row["pass_rate"] is not None else f"{value:.4g}"
