"""`palestra train --env-url URL`: train on what environments post to the trajectory API."""

from __future__ import annotations

import asyncio
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
    from palestra.wire.session import WireOutcome


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
    from palestra.faces.cli.common import refuse_busy
    from palestra.faces.cli.find_run import require_run
    from palestra.faces.cli.serve import require_serve_extra

    require_serve_extra()
    if resume is None:
        run = new_run(wire_config(config_file, options, wire.env), wire.url, wire.folder)
    else:
        longer = settings.max_steps_of_resumed(options, config_file)
        run = require_run(resume)
        refuse_busy(run.path)
        run.lengthen(longer)
    outcome = run_on_wire(run, wire.url, wire.port, console, resumed=resume is not None)
    present(run, outcome, console, as_json)


def wire_config(config_file: Path | None, options: dict[str, Any], env: str | None = None) -> RunConfig:
    """The settings of the run, without those of the environment (`env:`, `openai:`)."""
    from palestra.core.config import RunConfig
    from palestra.faces.cli.env_settings import read_settings

    own = _settings_of(env) if env is not None else {}
    config = RunConfig.build(WIRE_DEFAULTS, own, read_settings(config_file, options).run)
    if config.train.max_steps is None:
        raise PalestraError("environments over the wire have no last problem; set an end: --train.max_steps 100")
    return config


def _settings_of(name: str) -> Mapping[str, Any]:
    """The run settings that an environment recommends; environments of other dialects have none."""
    from palestra.envs.load import env_class, find_env

    env = find_env(name)
    return env_class(env).run_settings if env.dialect == "palestra" else {}


def new_run(config: RunConfig, url: str, folder: Path | None = None) -> RunFolder:
    from palestra.core.run_folder import RunFolder

    return RunFolder.create(Path(config.output_dir), "wire", config, {"env_url": url}, at=folder)


def run_on_wire(
    run: RunFolder,
    url: str,
    port: int,
    console: Console,
    *,
    resumed: bool = False,
    served: Callable[[str, Any], None] = lambda url, tokenizer: None,
    check: Callable[[], None] = lambda: None,
) -> WireOutcome:
    """Train in the run's folder; Ctrl-C prints the command that continues it."""
    from palestra.faces.cli.common import load_libraries

    config = run.config
    load_libraries(console, config.model.name)
    from palestra.faces.cli.common import listed, show_path
    from palestra.faces.cli.display import make_display
    from palestra.train.serving import load_seeded
    from palestra.wire.client import WireClient
    from palestra.wire.session import Address, train_over_wire

    loaded = load_seeded(config)
    token = os.environ.get("PALESTRA_TOKEN")
    display = make_display(console, config.track.log_every)

    def on_served(address: str, tokenizer: Any) -> None:
        display.note(f"environments sample from {address}/v1")
        served(address, tokenizer)

    try:
        with listed(display), display, asyncio.Runner() as runner:
            display.started(run.path)
            return train_over_wire(
                loaded, config, run.path, WireClient(url, token), Address(port=port, token=token), runner, display,
                resumed=resumed, served=on_served, check=check,
            )  # fmt: skip
    except KeyboardInterrupt:
        click.secho("\nStopped; every finished step is saved. Continue with:", fg="yellow", err=True)
        click.echo(f"  palestra train --env-url {url} --resume {show_path(run.path)}", err=True)
        raise click.exceptions.Exit(130) from None


def present(run: RunFolder, outcome: WireOutcome, console: Console, as_json: bool) -> None:
    """Write the report, which has no held-out evaluation, and print the results."""
    from palestra.faces.cli.common import gpu_name, show_path
    from palestra.report.write import write_report

    page = write_report(run, None, None, outcome.metrics, outcome.seconds, device=gpu_name())
    rewards = [row["reward_mean"] for row in outcome.metrics if "reward_mean" in row]
    console.print(
        f"{len(outcome.metrics)} steps in {outcome.seconds:.0f} s; mean score {rewards[0]:.3f} at the first, "
        f"{rewards[-1]:.3f} at the last\nthe trained model: {outcome.model_path}\nreport: {show_path(page)}",
        highlight=False,
    )
    if as_json:
        summary = {"steps": len(outcome.metrics), "reward_first": rewards[0], "reward_last": rewards[-1]}
        where = {"run_dir": str(run.path), "model_path": str(outcome.model_path), "report": str(page)}
        click.echo(json.dumps({**summary, **where, "seconds": round(outcome.seconds, 2)}))
