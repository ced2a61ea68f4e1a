"""`palestra completion`: what a shell needs to complete commands, options and the ids of runs."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(_SHELLS))
def command(shell: str) -> None:
    """Print the completion script of a shell.

    \b
    eval "$(palestra completion bash)"                                   in ~/.bashrc
    eval "$(palestra completion zsh)"                                    in ~/.zshrc
    palestra completion fish > ~/.config/fish/completions/palestra.fish
    """
    from palestra.faces.cli.main import cli

    completion = get_completion_class(shell)
    assert completion is not None
    click.echo(completion(cli, {}, "palestra", "_PALESTRA_COMPLETE").source())
