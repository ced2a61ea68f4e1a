"""`palestra eval`: score an agent, without training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from palestra.faces.cli import settings

if TYPE_CHECKING:
    from rich.console import Console

    from palestra.agents.agent import Agent
    from palestra.core.config import RunConfig
    from palestra.evals.report import EvalReport
    from palestra.evals.suite import EvalSuite


@click.command("eval", context_settings={"max_content_width": 100}, options_metavar="[OPTIONS] [--SECTION.KEY VALUE]…")
@click.argument("agent_file", required=False)
@click.option("--config", "config_file", type=click.Path(path_type=Path), metavar="FILE", help="Settings from YAML.")
@click.option("--json", "as_json", is_flag=True, help="End stdout with one line of JSON; all else goes to stderr.")
@settings.debug_option
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
    from rich.console import Console

    from palestra.core.yaml_config import read_yaml_config
    from palestra.evals.suite import EvalSuite
    from palestra.faces.cli.agent_file import configure, load_agent_file
    from palestra.faces.cli.find_run import with_model_of_run

    layer = read_yaml_config(config_file) if config_file else {}
    file = load_agent_file(agent_file)
    agent, config = configure(file, layer, with_model_of_run(settings.from_options(parameters)))
    suite = file.held_out if isinstance(file.held_out, EvalSuite) else file.suite
    report = _score(agent, suite, file.measures, config, Console(stderr=as_json))
    if as_json:
        summary = {
            "pass_rate": report.pass_rate.rate,
            "interval": [report.pass_rate.low, report.pass_rate.high],
            "measures": {m.name: m.pass_rate.rate for m in report.measures},
            "cases": len({rollout.problem_id for rollout in report.rollouts}),
            "seconds": round(report.seconds, 2),
        }
        click.echo(json.dumps(summary))


def _score(
    agent: Agent, suite: EvalSuite, measures: Sequence[Any] | None, config: RunConfig, console: Console
) -> EvalReport:
    from palestra.faces.cli.common import load_libraries

    load_libraries(console, config.model.name)
    from palestra.api import evaluate
    from palestra.faces.cli.display import make_display
    from palestra.faces.cli.summary import print_evaluation

    with make_display(console, config.track.log_every) as display:
        report = evaluate(agent, suite, measures, config=config, watcher=display)
    print_evaluation(console, agent.name, report)
    return report


settings.options(command)
