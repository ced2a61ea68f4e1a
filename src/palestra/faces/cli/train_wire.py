"""`palestra train --env-url URL`: train on what environments post to the trajectory API."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from palestra.core.errors import PalestraError
from palestra.faces.cli import settings

if TYPE_CHECKING:
    from rich.console import Console

    from palestra.core.config import RunConfig
    from palestra.core.run_folder import RunFolder
    from palestra.train.run import Outcome


# environments filter their groups, and choose the temperature, by themselves
WIRE_DEFAULTS = {"train.filter_equal_groups": False, "rollout.temperature": 1.0}


@dataclass(frozen=True)
class Wire:
    """The trajectory API, the port on which the model is served, the environment for its settings, the run folder."""

    url: str
    port: int
    env: str | None = None
    folder: Path | None = None


def train_on_url(
    wire: Wire,
    config_file: Path | None,
    options: dict[str, Any],
    resume: str | None,
    console: Console,
    as_json: bool,
) -> None:
    """Serve the model, train it over the wire, and print the results."""
    from palestra.faces.cli.find_run import require_run
    from palestra.faces.cli.serve import require_serve_extra
    from palestra.runs.foreground import refuse_busy

    require_serve_extra()
    if resume is None:
        config, scored_by = wire_config(config_file, options, wire.env)
        run = new_run(config, wire.url, wire.folder, scored_by)
    else:
        longer = settings.max_steps_of_resumed(options, config_file)
        run = require_run(resume)
        refuse_busy(run.path)
        run.lengthen(longer)
    outcome = run_on_wire(run, wire.url, wire.port, console, resumed=resume is not None)
    present(run, outcome, console, as_json)


def wire_config(
    config_file: Path | None, options: dict[str, Any], env: str | None = None
) -> tuple[RunConfig, dict[str, Any] | None]:
    """The settings of the run, and the environment of ours by which the model can be scored, if it is one."""
    from palestra.core.config import RunConfig
    from palestra.envs.load import env_class, find_env
    from palestra.faces.cli.env_settings import read_settings

    read = read_settings(config_file, options)
    own: Mapping[str, Any] = {}
    scored_by = None
    if env is not None and (found := find_env(env)).dialect == "palestra":
        own = env_class(found).run_settings
        name = str(Path(env).resolve()) if env.endswith(".py") else env
        scored_by = {"name": name, "settings": read.env}
    config = RunConfig.build(WIRE_DEFAULTS, own, read.run)
    if config.train.max_steps is None:
        raise PalestraError("environments over the wire have no last problem; set an end: --train.max_steps 100")
    return config, scored_by


def new_run(
    config: RunConfig, url: str, folder: Path | None = None, scored_by: dict[str, Any] | None = None
) -> RunFolder:
    from palestra.core.run_folder import RunFolder

    record = {"env_url": url} | ({"scored_by": scored_by} if scored_by else {})
    return RunFolder.create(Path(config.output_dir), "wire", config, record, at=folder)


def run_on_wire(
    run: RunFolder,
    url: str,
    port: int,
    console: Console,
    *,
    resumed: bool = False,
    served: Callable[[str, Any], None] = lambda url, tokenizer: None,
    check: Callable[[], None] = lambda: None,
) -> Outcome:
    """Train in the run's folder; Ctrl-C prints the command that continues it."""
    from palestra.faces.cli.common import load_libraries

    config = run.config
    load_libraries(console, config.model.name)
    from palestra.env_api import train_wire
    from palestra.faces.cli.common import show_path, sigterm_as_ctrl_c
    from palestra.faces.cli.display import make_display
    from palestra.wire.client import WireClient
    from palestra.wire.task import Address

    token = os.environ.get("PALESTRA_TOKEN")
    display = make_display(console, config.track.log_every)

    def on_served(address: str, tokenizer: Any) -> None:
        display.note(f"environments sample from {address}/v1")
        served(address, tokenizer)

    try:
        with sigterm_as_ctrl_c(), display:
            client, address = WireClient(url, token), Address(port=port, token=token)
            return train_wire(run, client, address, watcher=display, resumed=resumed, served=on_served, check=check)
    except KeyboardInterrupt:
        click.secho("\nStopped; every finished step is saved. Continue with:", fg="yellow", err=True)
        click.echo(f"  palestra train --env-url {url} --resume {show_path(run.path)}", err=True)
        raise click.exceptions.Exit(130) from None


def present(run: RunFolder, outcome: Outcome, console: Console, as_json: bool) -> None:
    """Print the results: before and after where the model could be scored here, the mean scores in any case."""
    from palestra.evals.report import compare
    from palestra.faces.cli.common import show_path
    from palestra.faces.cli.summary import change_table

    if outcome.before is not None and outcome.after is not None:
        console.print(change_table(compare(outcome.before, outcome.after)))
    page = show_path(outcome.report_path)
    rewards = [row["reward_mean"] for row in outcome.metrics if "reward_mean" in row]
    console.print(
        f"{len(outcome.metrics)} steps in {outcome.seconds:.0f} s; mean score {rewards[0]:.3f} at the first, "
        f"{rewards[-1]:.3f} at the last\nthe trained model: {outcome.model_path}\nreport: {page}",
        highlight=False,
    )
    if as_json:
        summary = {"steps": len(outcome.metrics), "reward_first": rewards[0], "reward_last": rewards[-1]}
        where = {"run_dir": str(run.path), "model_path": str(outcome.model_path), "report": str(outcome.report_path)}
        if outcome.before is not None and outcome.after is not None:
            rates = outcome.before.pass_rate.rate, outcome.after.pass_rate.rate
            summary |= dict(zip(("held_out_before", "held_out_after"), rates, strict=True))
        click.echo(json.dumps({**summary, **where, "seconds": round(outcome.seconds, 2)}))
