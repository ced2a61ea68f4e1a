"""`palestra envs`: which environments there are."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import click


@click.command("envs")
@click.option(
    "--path", "paths", multiple=True, type=click.Path(path_type=Path), help="Look in this folder or file too."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(paths: tuple[Path, ...], as_json: bool) -> None:
    """List the environments that there are: built in, in ./environments and PALESTRA_ENV_PATH, and installed.

    Their files are read, not run. `palestra train --env NAME` trains on one.
    """
    from palestra.envs.discover import discover

    found = discover(paths)
    if as_json:
        rows = [{**asdict(env), "preset": dict(env.preset)} for env in found.environments]
        errors = {str(path): reason for path, reason in found.errors.items()}
        click.echo(json.dumps({"environments": rows, "count": len(rows), "errors": errors}, default=str))
        return
    formatter = click.HelpFormatter(width=100)
    for origin, members in groupby(found.environments, lambda env: env.origin):
        with formatter.section(origin):
            formatter.write_dl([(env.name, env.description or env.class_name) for env in members], col_max=44)
    click.echo(formatter.getvalue().rstrip())
    for path, reason in found.errors.items():
        click.secho(f"{path} cannot be read: {reason}", fg="yellow", err=True)
