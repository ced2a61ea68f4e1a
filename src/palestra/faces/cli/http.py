"""`palestra http`: the rl_* tools over HTTP."""

from __future__ import annotations

import click

from palestra.core.errors import PalestraError
from palestra.faces.cli import settings
from palestra.faces.cli.serve import address_options


@click.command("http")
@address_options(8003)
@settings.debug_option
def command(host: str, port: int, token: str | None) -> None:
    """Serve the ten rl_* tools over HTTP, documented at /docs and /openapi.json.

    \b
    palestra http
    curl -X POST http://127.0.0.1:8003/tools/rl_list_environments
    """
    try:
        from palestra.faces.http_api import http_app
    except ImportError as missing:
        raise PalestraError(f"this needs {missing.name}; install it with: pip install 'palestra[http]'") from None
    from palestra.faces.cli.serve import run_server
    from palestra.faces.rl_tools.clients import Clients
    from palestra.faces.rl_tools.session import RlTools
    from palestra.runs.locks import load_site
    from palestra.runs.manager import RunManager
    from palestra.serve.web import open_port

    manager, site = RunManager(), load_site()
    app = http_app(Clients(lambda: RlTools(manager, site)), token)
    run_server(app, open_port(host, port, token), "the tools are served at")
