"""`palestra version`: what to paste into a bug report."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import click


@click.command("version")
def command() -> None:
    """Print the versions that matter in a bug report."""
    click.echo(f"palestra {version('palestra')}")
    click.echo(f"Python {platform.python_version()} on {platform.platform()}")
    for package in ("torch", "transformers", "peft"):
        try:
            click.echo(f"{package} {version(package)}")
        except PackageNotFoundError:
            click.echo(f"{package} is not installed")
