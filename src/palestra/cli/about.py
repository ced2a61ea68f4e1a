"""About the installation: `palestra doctor`, `palestra version`, `palestra completion`."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from importlib import metadata
from itertools import groupby

import click
from click.shell_completion import get_completion_class

from palestra.cli.common import json_option

_MARKS = {"ok": ("✓", "green"), "missing": ("·", "yellow"), "broken": ("✗", "red")}


@click.command("doctor")
@click.option("--model", "model_name", metavar="NAME", help="Check this model's chat template and tool calls instead.")
@json_option
def doctor(model_name: str | None, as_json: bool) -> None:
    """Check what this machine has: Python, torch, GPU, memory, disk, extras, keys, ports; with remedies.

    With --model NAME, check a model instead: tool calls that its chat template writes must be read back.

    ✓ is there, · is optional and missing, ✗ is needed and broken. The exit status is 1 only for the last.
    """
    from rich.console import Console

    from palestra.cli.doctor import examine, examine_model
    from palestra.train.progress import task

    with task(Console(stderr=True), f"examining {model_name or 'this machine'}"):
        checks = examine() if model_name is None else examine_model(model_name)
    broken = any(check.state == "broken" for check in checks)
    if as_json:
        click.echo(json.dumps({"ok": not broken, "findings": [asdict(check) for check in checks]}))
    else:
        for topic, members in groupby(checks, lambda check: check.topic):
            click.secho(topic, bold=True)
            for check in members:
                mark, color = _MARKS[check.state]
                click.echo(f"  {click.style(mark, fg=color)} {check.name}: {check.found}")
                if check.remedy:
                    click.echo(f"      → {check.remedy}")
    if broken:
        raise click.exceptions.Exit(1)


@click.command("version")
@json_option
def version(as_json: bool) -> None:
    """Print the versions that matter in a bug report."""
    from palestra.core.machine import installed_version

    versions = {
        "palestra": metadata.version("palestra"),
        "Python": f"{platform.python_version()} on {platform.platform()}",
        **{package: installed_version(package) or "is not installed" for package in ("torch", "transformers", "peft")},
    }
    if as_json:
        click.echo(json.dumps(versions))
        return
    for name, text in versions.items():
        click.echo(f"{name} {text}")


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script of a shell.

    \b
    eval "$(palestra completion bash)"                                   in ~/.bashrc
    eval "$(palestra completion zsh)"                                    in ~/.zshrc
    palestra completion fish > ~/.config/fish/completions/palestra.fish
    """
    root = click.get_current_context().find_root().command
    completion_class = get_completion_class(shell)
    assert completion_class is not None
    click.echo(completion_class(root, {}, "palestra", "_PALESTRA_COMPLETE").source())
