"""`palestra dashboard [PATH]`: runs, rollouts, tokens and suspicions in a browser."""

from __future__ import annotations

from pathlib import Path

import click

from palestra.agent_tools.launcher import FormLauncher
from palestra.cli.common import PATH, debug_option
from palestra.cli.serve import address_options, run_server, server_port
from palestra.cli.trust import trust_option
from palestra.core.errors import NotFoundError
from palestra.runs.index import run_folders
from palestra.runs.locks import load_site
from palestra.runs.manager import RunManager


@click.command("dashboard")
@click.argument("path", required=False, type=PATH)
@address_options(8004)
@trust_option
@debug_option
def command(path: Path | None, host: str, port: int, token: str | None, trust: bool) -> None:
    """Show runs in a browser: live curves, every rollout and token, and whether a rising reward is real.

    PATH is a run folder or a folder of some; without it, all runs are shown. Runs of others open, too: TRL's
    completions (Parquet), verifiers' results, ATIF trajectories, the logs of the Tinker cookbook.

    \b
    palestra dashboard
    palestra dashboard runs/my-agent-20260131-101500
    palestra dashboard trl_output/completions
    """
    socket = server_port(host, port, token)
    from palestra.dashboard.app import dashboard_app
    from palestra.dashboard.catalog import Catalog
    from palestra.dashboard.foreign import open_foreign

    folders = None if path is None else list(run_folders(path))
    foreign = open_foreign(path) if path is not None and not folders else None
    if folders == [] and foreign is None:
        raise NotFoundError(
            f"{path} holds no run; give a run folder or a folder of some, TRL's completions, verifiers' results, ATIF "
            "trajectories or the logs of the Tinker cookbook"
        )
    manager = RunManager()
    launcher = FormLauncher(manager, load_site())
    catalog = Catalog(manager, folders, [foreign] if foreign else [], trust=trust)
    app = dashboard_app(catalog, token, launcher=launcher, path=path)
    run_server(app, socket, "the dashboard is at", f"/?token={token}" if token else "")
