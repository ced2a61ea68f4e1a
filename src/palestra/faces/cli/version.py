"""`palestra version`: what to paste into a bug report."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version

import click


@click.command("version")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(as_json: bool) -> None:
    """Print the versions that matter in a bug report."""
    found = {"palestra": version("palestra"), "Python": f"{platform.python_version()} on {platform.platform()}"}
    found |= {package: _version(package) for package in ("torch", "transformers", "peft")}
    if as_json:
        click.echo(json.dumps(found))
        return
    for name, text in found.items():
        click.echo(f"{name} {text}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "is not installed"
