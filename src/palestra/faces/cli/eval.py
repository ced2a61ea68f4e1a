"""`palestra eval`: score an agent, without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from palestra.api import evaluate
from palestra.evals.suite import EvalSuite
from palestra.faces.cli import settings
from palestra.faces.cli.agent_file import open_agent_file
from palestra.faces.cli.common import config_option, debug_option, json_line_option, load_libraries
from palestra.faces.cli.display import make_display
from palestra.faces.cli.find_run import with_model_of_run
from palestra.faces.cli.summary import print_evaluation


@click.command("eval", context_settings={"max_content_width": 100}, options_metavar="[OPTIONS] [--SECTION.KEY VALUE]…")
@click.argument("agent_file", required=False)
@config_option
@json_line_option
@debug_option
def command(agent_file: str | None, config_file: Path | None, as_json: bool, **parameters: Any) -> None:
    """Score an agent on its held-out cases (the whole suite if its file has none), without training.

    \b
    Examples:
      palestra eval
      palestra eval my_agent.py
      palestra eval my_agent.py --model.name k3f9      the model of a run: its id, name or folder
      palestra eval my_agent.py --eval.samples_per_case 4 --eval.temperature 0.8

    `palestra config --keys` lists every setting.
    """
    options = with_model_of_run(settings.from_options(parameters))
    file, agent, config = open_agent_file(agent_file, config_file, options)
    suite = file.held_out if isinstance(file.held_out, EvalSuite) else file.suite
    console = Console(stderr=as_json)
    load_libraries(console, config.model.name)
    with make_display(console, config.track.log_every) as display:
        report = evaluate(agent, suite, file.measures, config=config, watcher=display)
    print_evaluation(console, agent.name, report)
    if as_json:
        summary = {
            "pass_rate": report.pass_rate.rate,
            "interval": [report.pass_rate.low, report.pass_rate.high],
            "measures": {m.name: m.pass_rate.rate for m in report.measures},
            "cases": len({rollout.problem_id for rollout in report.rollouts}),
            "seconds": round(report.seconds, 2),
        }
        click.echo(json.dumps(summary))


settings.options(command)
