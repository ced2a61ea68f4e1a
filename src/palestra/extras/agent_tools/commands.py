"""The rl_* tools for agents: `palestra mcp`, `palestra tools`; `palestra config --locked`."""

from __future__ import annotations

import json
import os
import secrets
import sys
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from palestra.cli.serve import address_options, run_server, server_port
from palestra.cli.settings import show
from palestra.core.errors import needs_extra
from palestra.core.extras import is_installed, provided
from palestra.extras.agent_tools import RlTools, tool_schemas
from palestra.extras.agent_tools.clients import Clients
from palestra.extras.agent_tools.launcher import FormLauncher
from palestra.extras.agent_tools.locks import SITE_FILE, SITE_VARIABLE, load_site, locks_of
from palestra.runs.manager import RunManager


@click.command("mcp")
@click.option("--http", "over_http", is_flag=True, help="Serve many clients over streamable HTTP instead of stdio.")
@address_options(8002)
def mcp(over_http: bool, host: str, port: int, token: str | None) -> None:
    """Let an agent train models: the ten rl_* tools over the Model Context Protocol.

    \b
    palestra mcp                      one client, on stdin and stdout; clients start it themselves
    palestra mcp --http               many clients at http://127.0.0.1:8002/mcp; the dashboard is at /dashboard/
    claude mcp add palestra -- palestra mcp
    curl -X POST http://127.0.0.1:8002/tools/rl_list_environments     a tool without MCP

    `palestra config --locked` shows the settings that an agent may not change.
    """
    with needs_extra("this", "mcp"):
        from palestra.extras.agent_tools.mcp_server import http_app, make_server, run_stdio
        from palestra.servers.web import url_of

    manager, site = RunManager(), load_site()
    clients = Clients(lambda: RlTools(manager, site))
    if not over_http:
        if sys.stdin.isatty():
            click.echo("a client starts this and talks with it on stdin; Ctrl-C ends it, --http serves many", err=True)
        run_stdio(make_server(clients))
        return
    socket, dashboard, place = server_port(host, port, token), None, "/mcp"
    if is_installed("dashboard"):
        page_token = token or secrets.token_urlsafe()  # unlike the tools, the dashboard always has one
        dashboard = provided("the dashboard")(manager, page_token, FormLauncher(manager, site))
        place += f"\nthe dashboard is at {url_of(socket)}/dashboard/?token={quote(page_token, safe='')}"
    run_server(http_app(clients, token, dashboard), socket, "the tools are served at", place)


@click.group("tools")
def tools() -> None:
    """The rl_* tools, with which an agent trains models."""


@tools.command("schema")
@click.option("--json/--list", "as_json", default=True, help="The schemas (default), or a line for each tool.")
def schema(as_json: bool) -> None:
    """Print the schemas of the tools, in OpenAI's function-calling format."""
    schemas = tool_schemas()
    if as_json:
        click.echo(json.dumps(schemas, indent=1))
        return
    for function in (row["function"] for row in schemas):
        click.echo(f"{function['name']}({', '.join(function['parameters']['properties'])})")
        click.echo(f"    {function['description'].splitlines()[0]}")


def locked_settings() -> tuple[dict[str, Any], list[tuple[str, list[tuple[str, str]]]]]:
    """The settings that agents may not change here and the limits of their requests, as data and as titled lists."""
    settings = load_site()
    file = Path(os.environ.get(SITE_VARIABLE) or SITE_FILE)
    site = str(file) if file.is_file() else None
    rows = [{**asdict(lock), "name": lock.full_name} for lock in locks_of(settings)]
    rest = settings.model_dump(include={"profile", "limits", "inference"}) | {"maximum": settings.maximums}
    own = settings.limits
    sections = [(f"profile {settings.profile}", [("site file", site or "none")])]
    sections += [
        (f"{section}, locked", [(f"{lock.name} = {show(lock.value)}", lock.description) for lock in members])
        for section, members in groupby(locks_of(settings), lambda lock: lock.section)
    ]
    sections += [
        ("largest values", [(f"{key} = {show(value)}", "") for key, value in settings.maximums.items()]),
        (
            "limits",
            [(f"{n} = {show(getattr(own, n))}", i.description or "") for n, i in type(own).model_fields.items()],
        ),
    ]
    return {"site": site, "locks": rows, **rest}, sections
