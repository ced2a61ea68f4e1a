"""`palestra doctor`: what this machine can do, and what it lacks."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import groupby

import click

_MARKS = {"ok": ("✓", "green"), "missing": ("·", "yellow"), "broken": ("✗", "red")}


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(as_json: bool) -> None:
    """Say what this machine can do: Python, torch, GPU, memory, disk, extras, keys, ports; each with the remedy.

    ✓ is there, · is optional and missing, ✗ is needed and broken. The exit status is 1 only for the last.
    """
    from palestra.faces.doctor import examine

    findings = examine()
    broken = any(finding.state == "broken" for finding in findings)
    if as_json:
        click.echo(json.dumps({"ok": not broken, "findings": [asdict(finding) for finding in findings]}))
    else:
        for topic, members in groupby(findings, lambda finding: finding.topic):
            click.secho(topic, bold=True)
            for finding in members:
                mark, color = _MARKS[finding.state]
                click.echo(f"  {click.style(mark, fg=color)} {finding.name}: {finding.found}")
                if finding.remedy:
                    click.echo(f"      → {finding.remedy}")
    if broken:
        raise click.exceptions.Exit(1)
