"""`palestra serve` (OpenAI- and Anthropic-compatible), and functions for other servers."""

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

from palestra.cli.common import device_option, dtype_option, load_libraries
from palestra.cli.find_run import model_of
from palestra.core.errors import needs_extra
from palestra.train.progress import task

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_BACKLOG = 2048  # connections that wait until the server accepts them


def hide_token(ctx: click.Context, param: click.Parameter, token: str | None) -> str | None:
    """Start this process again with the token in PALESTRA_TOKEN: other users can read a process's arguments."""
    if token and ctx.get_parameter_source("token") is ParameterSource.COMMANDLINE and sys.platform != "win32":
        words = "".join(f"\0{word}" for word in sys.orig_argv[1:])
        if re.search(f"\0--token[=\0]{re.escape(token)}(\0|$)", words):  # else a function called the command
            others = re.sub("\0--token[=\0][^\0]*", "", words).split("\0")[1:]
            os.execve(sys.executable, [sys.executable, *others], {**os.environ, "PALESTRA_TOKEN": token})
    return token


PORT = click.IntRange(0, 65535)


def address_options(port: int) -> Any:
    """The options --host, --port and --token of a server."""

    def add(function: Any) -> Any:
        for option in (
            click.option("--token", envvar="PALESTRA_TOKEN", show_envvar=True, callback=hide_token, help="For clients"),
            click.option("--port", default=port, show_default=True, type=PORT, help="0: any free."),
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
    from palestra.servers.openai.inference import inference_app, load_completer
    from palestra.servers.web import request_log

    with task(console, f"loading {model}"):
        completer = load_completer(model, **loading)
    app = inference_app(completer, token=token, weights_folder=weights_from)
    handler = logging.StreamHandler()  # a line on stderr for each request
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    request_log.addHandler(handler)
    request_log.setLevel(logging.INFO)
    request_log.propagate = False
    run_server(app, socket, f"{model} is served at", "/v1")


def server_port(host: str, port: int, token: str | None) -> Any:
    """The bound socket of a server; an address that cannot be used is an error before anything is loaded."""
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


def require_serve_extra() -> None:
    with needs_extra("this", "serve"):
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
