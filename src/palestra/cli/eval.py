"""`palestra eval`: score an agent, without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from palestra.agent_source import AgentFile, AgentOptions
from palestra.agents.programs import ProgramAgent
from palestra.api import evaluate
from palestra.cli import settings
from palestra.cli.common import agent_options, load_libraries, out_option
from palestra.cli.find_run import (
    with_model_of_run,
)
from palestra.cli.summary import capability_of, print_evaluation
from palestra.core.errors import SettingError
from palestra.evals.evidence import RunFacts
from palestra.evals.suite import EvalSuite, hold_out
from palestra.train.progress import make_display


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
