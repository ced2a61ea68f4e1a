"""`palestra locks`: the settings that agents may not change here, and the limits of their requests."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import click

from palestra.faces.cli.settings import show


@click.command("locks")
@click.option("--site", type=click.Path(path_type=Path), help="A site file; else PALESTRA_SITE or ./palestra.yaml.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(site: Path | None, as_json: bool) -> None:
    """Show the settings that agents may not change here, and the limits of their requests.

    \b
    A site file changes them:
      profile: local                 # or tinker
      trainer: {learning_rate: 1e-5} # lock: env, server, trainer, or run for any setting of a run
      run: {model.name: Qwen/Qwen3-0.6B}
      unlock: [server.timeout]
      maximum: {train.max_steps: 500}
      limits: {status_check_minutes: 5}
    """
    from palestra.runs.locks import SITE_FILE, SITE_VARIABLE, load_site, locks_of

    settings = load_site(site)
    file = site or Path(os.environ.get(SITE_VARIABLE) or SITE_FILE)
    locks = locks_of(settings)
    if as_json:
        rows = [{**asdict(lock), "name": lock.full_name} for lock in locks]
        rest = settings.model_dump(include={"profile", "maximum", "limits", "inference"})
        click.echo(json.dumps({"site": str(file) if file.is_file() else None, "locks": rows, **rest}))
        return
    click.echo(f"profile {settings.profile}; {f'site file {file}' if file.is_file() else 'no site file'}")
    formatter = click.HelpFormatter(width=100)
    for section, members in groupby(locks, lambda lock: lock.section):
        with formatter.section(f"{section}, locked"):
            formatter.write_dl(
                [(f"{lock.name} = {show(lock.value)}", lock.description) for lock in members], col_max=44
            )
    if settings.maximum:
        with formatter.section("largest values"):
            formatter.write_dl([(f"{key} = {show(value)}", "") for key, value in settings.maximum.items()])
    with formatter.section("limits"):
        fields = type(settings.limits).model_fields
        limits = [(f"{n} = {show(getattr(settings.limits, n))}", i.description or "") for n, i in fields.items()]
        formatter.write_dl(limits, col_max=44)
    click.echo(formatter.getvalue().rstrip())
