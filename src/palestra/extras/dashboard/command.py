"""`palestra dashboard [PATH]`: runs, rollouts, tokens and signs of reward hacking in a browser."""

from __future__ import annotations

import secrets
from pathlib import Path
from urllib.parse import quote

import click

from palestra.cli.common import PATH
from palestra.cli.find_run import trust_option
from palestra.cli.serve import address_options, run_server, server_port
from palestra.core.errors import NotFoundError
from palestra.core.extras import is_installed, provided
from palestra.runs.index import run_folders
from palestra.runs.manager import RunManager


@click.command("dashboard")
@click.argument("path", required=False, type=PATH)
@address_options(8004)
@click.option("--agents-folder", type=PATH, multiple=True, help="Agent files and measures may lie here, too.")
@trust_option
def command(
    path: Path | None, host: str, port: int, token: str | None, agents_folder: tuple[Path, ...], trust: bool
) -> None:
    """Show runs in a browser: live curves, every rollout and token, and whether a rising reward is real.

    PATH is a run folder or a folder that contains some; without it, all runs are shown.
    The printed address has the token, a random one if none is set. Code is run from the working directory only.

    \b
    palestra dashboard
    palestra dashboard runs/my-agent-20260131-101500
    """
    socket = server_port(host, port, token)
    token = token or secrets.token_urlsafe()
    from palestra.extras.dashboard.app import dashboard_app
    from palestra.extras.dashboard.catalog import Catalog

    folders = None if path is None else list(run_folders(path))
    if folders == []:
        raise NotFoundError(f"{path} holds no run; give a run folder or a folder that contains some")
    manager = RunManager()
    can_start = is_installed("agent_tools")
    launcher = provided("the form of the dashboard")(manager, folders=agents_folder) if can_start else None
    app = dashboard_app(Catalog(manager, folders, trust=trust), token, launcher=launcher, path=path)
    run_server(app, socket, "the dashboard is at", f"/?token={quote(token, safe='')}")
