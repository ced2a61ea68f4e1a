"""`palestra dashboard [PATH]`: runs, rollouts, tokens and signs of reward hacking in a browser."""

from __future__ import annotations

from pathlib import Path

import click

from palestra.cli.common import PATH, debug_option
from palestra.cli.serve import address_options, run_server, server_port
from palestra.cli.trust import trust_option
from palestra.core.errors import NotFoundError
from palestra.core.extras import is_installed, provided
from palestra.runs.locks import load_site
from palestra.runs.manager import RunManager


@click.command("dashboard")
@click.argument("path", required=False, type=PATH)
@address_options(8004)
@trust_option
@debug_option
def command(path: Path | None, host: str, port: int, token: str | None, trust: bool) -> None:
    """Show runs in a browser: live curves, every rollout and token, and whether a rising reward is real.

    PATH is a run folder or a folder that contains some; without it, all runs are shown.

    \b
    palestra dashboard
    palestra dashboard runs/my-agent-20260131-101500
    """
    socket = server_port(host, port, token)
    from palestra.extras.dashboard.app import dashboard_app
    from palestra.extras.dashboard.catalog import Catalog, run_folders

    folders = None if path is None else list(run_folders(path))
    if folders == []:
        raise NotFoundError(f"{path} holds no run; give a run folder or a folder that contains some")
    manager = RunManager()
    launcher = provided("the form of the dashboard")(manager, load_site()) if is_installed("agent_tools") else None
    catalog = Catalog(manager, folders, trust=trust)
    app = dashboard_app(catalog, token, launcher=launcher, path=path)
    run_server(app, socket, "the dashboard is at", f"/?token={token}" if token else "")
