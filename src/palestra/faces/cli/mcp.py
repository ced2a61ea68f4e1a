"""`palestra mcp`: the rl_* tools over the Model Context Protocol."""

from __future__ import annotations

import asyncio

import click

from palestra.core.errors import PalestraError
from palestra.faces.cli import settings
from palestra.faces.cli.serve import address_options


@click.command("mcp")
@click.option("--http", "over_http", is_flag=True, help="Serve many clients over streamable HTTP instead of stdio.")
@address_options(8002)
@settings.debug_option
def command(over_http: bool, host: str, port: int, token: str | None) -> None:
    """Let an agent train models: the ten rl_* tools over the Model Context Protocol.

    \b
    palestra mcp                      one client, on stdin and stdout; clients start it themselves
    palestra mcp --http               many clients at http://127.0.0.1:8002/mcp
    claude mcp add palestra -- palestra mcp

    `palestra locks` shows the settings that an agent may not change.
    """
    try:
        from palestra.faces.mcp_server import http_app, make_server, serve_stdio
    except ImportError as missing:
        raise PalestraError(f"this needs {missing.name}; install it with: pip install 'palestra[mcp]'") from None
    from palestra.faces.cli.serve import run_server
    from palestra.faces.rl_tools.clients import Clients
    from palestra.faces.rl_tools.session import RlTools
    from palestra.runs.locks import load_site
    from palestra.runs.manager import RunManager
    from palestra.serve.web import open_port

    manager, site = RunManager(), load_site()
    server = make_server(Clients(lambda: RlTools(manager, site)))
    if over_http:
        run_server(http_app(server, token), open_port(host, port, token), "the tools are served at", "/mcp")
    else:
        asyncio.run(serve_stdio(server))
