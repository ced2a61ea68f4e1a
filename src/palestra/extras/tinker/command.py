"""`palestra tinker`: serve models to the Tinker SDK."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from palestra.cli.common import PATH, device_option, dtype_option, load_libraries
from palestra.cli.serve import address_options, run_server, server_port
from palestra.train.progress import task

SWITCH_S = 0.001  # threads that train and sample yield to the one that answers: at 5 ms, requests come in too slowly


@click.command("tinker")
@click.argument("names", nargs=-1, metavar="[MODELS]...")
@address_options(8010)
@dtype_option
@device_option
@click.option("--output_dir", "folder", type=PATH, default="runs", show_default=True, help="For runs.")
@click.option("--max-sessions", "sessions", default=64, show_default=True, type=click.IntRange(1), help="Clients.")
@click.option(
    "--max-models", "models", default=8, show_default=True, type=click.IntRange(1), help="Models in training."
)
@click.option("--memory-gib", type=click.FloatRange(0, min_open=True), help="Of adapters and optimizers together.")
@click.option(
    "--rows-per-pass",
    type=click.IntRange(1),
    help="Rows computed together; 1: gradients do not depend on how rows are split. [default: 4 on a CPU, else all]",
)
def tinker(
    names: tuple[str, ...],
    host: str,
    port: int,
    token: str | None,
    dtype: str,
    device: str,
    folder: Path,
    **limits: Any,
) -> None:
    """Serve MODELS (palestra/tiny if none is given) to the Tinker SDK and the Tinker cookbook.

    \b
    palestra tinker palestra/tiny
    TINKER_BASE_URL=http://127.0.0.1:8010 TINKER_API_KEY=tml-local python my_recipe.py

    Each model that a client trains is a run: `palestra runs` lists it. What a client saves lies in the run's folder,
    so that its tinker:// paths survive a restart. Other hosts than loopback need --token, an API key that begins
    with tml-.
    """
    socket = server_port(host, port, token)
    names = names or ("palestra/tiny",)
    console = Console(stderr=True)
    load_libraries(console, names[0])
    from palestra.extras.tinker.server.base_model import BaseModel
    from palestra.extras.tinker.server.server import tinker_app
    from palestra.extras.tinker.server.service import Service, ServiceLimits

    with task(console, f"loading {', '.join(names)}"):
        bases = [BaseModel.load(name, dtype=dtype, device=device) for name in names]
    for base in bases:
        if base.path != base.name:
            click.echo(f"the tokenizer of {base.name}, for clients that load one: {base.path}")
    sys.setswitchinterval(SWITCH_S)
    app = tinker_app(Service(bases, folder, ServiceLimits(**limits)), token=token)
    run_server(app, socket, f"{', '.join(names)} served to the Tinker SDK at")
