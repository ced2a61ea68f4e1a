"""Servers: `palestra serve` (OpenAI- and Anthropic-compatible), `palestra trajectory`, `palestra tinker`."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.console import Console

from palestra.cli.common import PATH, debug_option, device_option, dtype_option, load_libraries
from palestra.cli.find_run import model_of
from palestra.core.errors import needs_extra
from palestra.train.progress import task

if TYPE_CHECKING:
    from starlette.types import ASGIApp

SWITCH_S = 0.001  # threads that train and sample yield to the one that answers: at 5 ms, requests come in too slowly
_BACKLOG = 2048  # connections that wait until the server accepts them


def hide_token(ctx: click.Context, param: click.Parameter, token: str | None) -> str | None:
    """Start this process again with the token in PALESTRA_TOKEN: other users can read a process's arguments."""
    if token and ctx.get_parameter_source("token") is ParameterSource.COMMANDLINE and sys.platform != "win32":
        words = "".join(f"\0{word}" for word in sys.orig_argv[1:])
        if re.search(f"\0--token[=\0]{re.escape(token)}(\0|$)", words):  # else a function called the command
            kept = re.sub("\0--token[=\0][^\0]*", "", words).split("\0")[1:]
            os.execve(sys.executable, [sys.executable, *kept], {**os.environ, "PALESTRA_TOKEN": token})
    return token


def address_options(port: int) -> Any:
    """The options --host, --port and --token of a server."""

    def add(function: Any) -> Any:
        for option in (
            click.option("--token", envvar="PALESTRA_TOKEN", show_envvar=True, callback=hide_token, help="For clients"),
            click.option("--port", default=port, show_default=True, type=click.IntRange(0, 65535), help="0: any free."),
            click.option("--host", default="127.0.0.1", show_default=True, help="Others than loopback need a token."),
        ):
            function = option(function)
        return function

    return add


@click.command("serve")
@click.argument("run_or_model")
@address_options(8000)
@dtype_option
@device_option
@click.option("--engine", default="auto", type=click.Choice(["auto", "paged", "plain"]))
@click.option(
    "--weights-from",
    type=click.Path(path_type=Path, file_okay=False),
    help="Let a trainer (rollout.policy_url) give the model new weights, by files in this folder.",
)
@debug_option
def command(
    run_or_model: str, host: str, port: int, token: str | None, weights_from: Path | None, **loading: str
) -> None:
    """Serve a run's trained model, or any other, over the HTTP APIs of OpenAI, Anthropic, vLLM and SGLang.

    RUN is a run's id, name or folder; RUN@50 or RUN@best is one of its checkpoints.

    \b
    palestra serve palestra/tiny
    palestra serve k3f9 --port 9000

    \b
    from openai import OpenAI
    client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    client.chat.completions.create(model="any", messages=[{"role": "user", "content": "hi"}])
    """
    model, _ = model_of(run_or_model)
    socket = server_port(host, port, token)
    console = Console(stderr=True)
    load_libraries(console, model)
    from palestra.servers.openai.inference import inference_app
    from palestra.servers.openai.loading import load_completer

    with task(console, f"loading {model}"):
        completer = load_completer(model, **loading)
    app = inference_app(completer, token=token, weights_folder=weights_from)
    _show_requests()
    run_server(app, socket, f"{model} is served at", "/v1")


@click.command("trajectory")
@address_options(8001)
@click.option("--folder", type=PATH, default="trajectories", show_default=True, help="For groups.")
@click.option("--max-waiting", default=65_536, show_default=True, help="Sequences that may be queued for the trainer.")
@click.option("--max-waiting-mib", default=4096, show_default=True, help="What they may take on disk.")
@click.option("--max-body-mib", default=128, show_default=True, help="The largest request, decompressed.")
@debug_option
def trajectory(host: str, port: int, token: str | None, folder: Path, **limits: int) -> None:
    """Serve the trajectory API: environments post scored groups, a trainer takes batches of them.

    \b
    palestra trajectory
    palestra train --env-url http://127.0.0.1:8001 --model.name palestra/tiny --train.max_steps 10

    Accepted groups are on disk before the answer is sent, and survive a restart.
    """
    socket = server_port(host, port, token)
    from palestra.sources.wire.server import trajectory_app

    run_server(trajectory_app(folder, token=token, **limits), socket, "the trajectory API is at")


@click.command("tinker")
@click.argument("names", nargs=-1, metavar="[MODELS]...")
@address_options(8010)
@dtype_option
@device_option
@click.option("--output_dir", type=PATH, default="runs", show_default=True, help="For runs.")
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
@debug_option
def tinker(
    names: tuple[str, ...],
    host: str,
    port: int,
    token: str | None,
    dtype: str,
    device: str,
    output_dir: Path,
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
    from palestra.servers.tinker.base_model import BaseModel
    from palestra.servers.tinker.server import tinker_app
    from palestra.servers.tinker.service import Service, ServiceLimits

    with task(console, f"loading {', '.join(names)}"):
        bases = [BaseModel.load(name, dtype=dtype, device=device) for name in names]
    for base in bases:
        if base.path != base.name:
            click.echo(f"the tokenizer of {base.name}, for clients that load one: {base.path}")
    sys.setswitchinterval(SWITCH_S)
    app = tinker_app(Service(bases, output_dir, ServiceLimits(**limits)), token=token)
    run_server(app, socket, f"{', '.join(names)} served to the Tinker SDK at")


def server_port(host: str, port: int, token: str | None) -> Any:
    """The bound socket of a server: what is wrong with its address is told before anything is loaded."""
    require_serve_extra()
    from palestra.servers.web import open_port

    return open_port(host, port, token)


def run_server(app: ASGIApp, socket: Any, message: str, path: str = "") -> None:
    """Serve until Ctrl-C or SIGTERM."""
    from palestra.servers.web import Server, url_of

    server = Server(app, handle_signals=True)

    async def serve() -> None:  # Ctrl-C before the event loop is whole would end with a traceback
        socket.listen(_BACKLOG)  # so that whoever has read the line can connect
        click.echo(f"{message} {url_of(socket)}{path}")
        await server.serve(sockets=[socket])

    asyncio.run(serve())


def _show_requests() -> None:
    """A line on stderr for each request."""
    from palestra.servers.web import request_log

    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    request_log.addHandler(handler)
    request_log.setLevel(logging.INFO)
    request_log.propagate = False


def require_serve_extra() -> None:
    with needs_extra("this", "serve"):
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
