"""`palestra train --env-url URL`: train on what environments post to the trajectory API."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from palestra.cli.common import absolute_name
from palestra.cli.display import training_display
from palestra.cli.settings import EnvSettings
from palestra.cli.summary import change_table, outcome_summary, print_findings
from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.run_folder import Resume, RunFolder
from palestra.core.show import show_path, show_seconds
from palestra.env_api import train_wire
from palestra.envs.load import env_class, find_env
from palestra.sources.wire import WIRE_DEFAULTS
from palestra.sources.wire.protocol import WireClient

if TYPE_CHECKING:
    from palestra.train.run import Outcome

wait_limit_option = click.option(
    "--wait-limit",
    "wait_limit_s",
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="Over the wire: stop when no group arrives for so long while the environment fails. 0: never.",
)


def new_run_for(env: str | None, url: str, folder: Path | None, read: EnvSettings) -> RunFolder:
    """A new run with the settings that suit the environment; one of ours also scores the model."""
    own: Mapping[str, Any] = {}
    record: dict[str, Any] = {"env_url": url}
    if env is not None and (found := find_env(env)).dialect == "palestra":
        own = env_class(found).run_settings
        record["scored_by"] = {"name": absolute_name(env), "settings": read.env}
    return new_run(wire_config(own, read.run), record, folder)


def wire_config(*layers: Mapping[str, Any]) -> RunConfig:
    """The config of a run over the wire: the layers of settings over its defaults."""
    config = RunConfig.build(WIRE_DEFAULTS, *layers)
    if config.train.max_steps is None:
        raise PalestraError("environments over the wire have no last problem; set an end: --train.max_steps 100")
    return config


def new_run(config: RunConfig, record: dict[str, Any], folder: Path | None = None) -> RunFolder:
    return RunFolder.create(Path(config.output_dir), "wire", config, record, at=folder)


def run_on_wire(
    run: RunFolder,
    url: str,
    port: int,
    console: Console,
    *,
    continued_by: str,
    token: str | None,
    wait_limit_s: float,
    resume: Resume | None = None,
    served: Callable[[str, Any], None] = lambda url, tokenizer: None,
    check: Callable[[], None] = lambda: None,
) -> Outcome:
    """Train in the run's folder; Ctrl-C prints `continued_by`, the command that continues it with --resume."""
    with training_display(console, run.config, continued_by) as display:
        from palestra.sources.wire.task import Address

        display.run_dir = run.path

        def on_served(address: str, tokenizer: Any) -> None:
            display.note(f"environments sample from {address}/v1")
            served(address, tokenizer)

        return train_wire(
            run,
            WireClient(url, token, note=display.note),
            Address(port=port, token=token),
            watcher=display,
            resume=resume,
            served=on_served,
            check=check,
            wait_limit_s=wait_limit_s,
        )


def present(run: RunFolder, outcome: Outcome, console: Console, as_json: bool) -> None:
    """Print the results: before and after where the model could be scored here, the mean scores in any case."""
    if outcome.before is not None and outcome.after is not None:
        console.print(change_table(outcome.before, outcome.after))
    print_findings(console, outcome.findings)
    page = show_path(outcome.report_path)
    rewards = [row["reward_mean"] for row in outcome.metrics if "reward_mean" in row]
    steps = len({row["step"] for row in outcome.metrics})  # an evaluation adds a row to its step
    console.print(
        f"{steps} steps in {show_seconds(outcome.seconds)}; mean score {rewards[0]:.3f} at the first, "
        f"{rewards[-1]:.3f} at the last\nthe trained model: {outcome.model_path}\nreport: {page}",
        highlight=False,
    )
    if as_json:
        summary = {"steps": steps, "reward_first": rewards[0], "reward_last": rewards[-1]}
        click.echo(json.dumps(summary | outcome_summary(run, outcome)))
