"""`palestra envs`: the available environments."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from itertools import groupby
from typing import Any

import click
from rich.console import Console

from palestra.cli.common import print_sections, returns_data
from palestra.envs.discover import discover


@click.command("envs")
@click.option("--path", "paths", multiple=True, type=click.Path(exists=True), help="Search this folder or file too.")
@click.option("--all", "show_all", is_flag=True, help="List every dataset of a family such as reasoning_gym.")
@returns_data
def command(paths: tuple[str, ...], show_all: bool, console: Console) -> dict[str, Any]:
    """List the available environments: built in, in ./environments and PALESTRA_ENV_PATH, and installed.

    Their files are read, not run. `palestra train --env NAME` trains on one.
    """
    discovery = discover(paths)
    sections = []
    for origin, group in groupby(discovery.environments, lambda env: env.origin):
        members = list(group)  # those that differ only in their preset are one row
        rows = [(e.name, e.description or e.class_name) for e in members if show_all or not e.preset]
        families = Counter(e.name.partition("/")[0] for e in members if e.preset and not show_all)
        rows += [(f"{name}/…", f"{count} environments; --all lists them.") for name, count in families.items()]
        sections.append((origin, rows))
    print_sections(console, sections)
    if not console.quiet:
        for path, reason in discovery.errors.items():
            click.secho(f"{path} cannot be read: {reason}", fg="yellow", err=True)
    every = [{**asdict(env), "preset": dict(env.preset)} for env in discovery.environments]
    errors = {str(path): reason for path, reason in discovery.errors.items()}
    return {"environments": every, "count": len(every), "errors": errors}
