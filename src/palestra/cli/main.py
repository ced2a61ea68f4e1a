"""`palestra`: the command line. A command's module is imported when it is called, so that --help is fast."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module

import click

from palestra.core import extras
from palestra.core.errors import InputError, PalestraError, did_you_mean
from palestra.core.process_end import run_process
from palestra.core.ranks import RankFailed, is_first_rank

# group -> name -> (module of this folder, or module:attribute where it is not `command`; its line in --help)
GROUPS = {
    "Train and score": {
        "init": ("init", "Write an agent file, cases and a measure to start from."),
        "train": ("train", "Train an agent and show that it got better."),
        "sft": ("train:sft", "Train a model on conversations."),
        "eval": ("train:eval_command", "Score an agent without training."),
        "envs": ("env:envs", "List the available environments."),
        "env": ("env", "Run one environment: look at its rollouts, score a model on it."),
    },
    "Runs": {
        "runs": ("runs", "List, watch, stop, resume, compare and clean up runs."),
    },
    "Use a model": {
        "chat": ("chat", "Chat with a trained model that has its tools."),
        "serve": ("serve", "Serve a model to any client, like a hosted API; nothing is recorded."),
        "export": ("export", "Export a model (Hugging Face folder or hub, GGUF, Ollama) or a run's page."),
    },
    "Agents and environments in other programs": {},
    "Trainings run by an LLM agent": {},
    "Installation and settings": {
        "config": ("settings:config_command", "Print the settings a run would use, or all settings."),
        "doctor": ("doctor", "Check this machine: versions, and what is missing."),
    },
}
for _name, (_group, _place, _line) in extras.COMMANDS.items():
    if _group:
        GROUPS[_group][_name] = ("", _line)
REMOVED = {  # command -> its replacement
    "locks": "run: palestra config --locked",
    "completion": 'put into ~/.bashrc: eval "$(_PALESTRA_COMPLETE=bash_source palestra)" (or zsh_source, fish_source)',
    "version": "run: palestra doctor",
    "bench": "run in a clone of the repository: python benchmarks/sampling.py",
    "judge-check": "run in a clone of the repository: python examples/judge_agreement.py",
    "improve": "PyPI's gepa evolves instructions and tool descriptions; score them with palestra.evaluate",
    "http": "`palestra mcp --http` has its tools, at /tools/NAME and /mcp, and the dashboard",
}
COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}


class LazyGroup(click.Group):
    """A group that imports a command only when that command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        if cmd_name in extras.COMMANDS:
            command = extras.command(cmd_name)
        else:
            module, _, attribute = COMMANDS[cmd_name][0].partition(":")
            command = getattr(import_module(f"palestra.cli.{module}"), attribute or "command")
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), line) for name, (_, line) in commands.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0].endswith(".py"):
            raise click.UsageError(f"{args[0]} is a file, not a command. Did you mean 'palestra train {args[0]}'?", ctx)
        if args and args[0] in REMOVED:
            raise InputError(f"palestra {args[0]} was removed; {REMOVED[args[0]]}")
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(f"There is no command {args[0]!r}.{did_you_mean(args[0], COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="palestra", message="palestra %(version)s", help="Print the version.")
@click.option("--debug", is_flag=True, expose_value=False, help="Show tracebacks of errors; also after a command.")
def cli() -> None:
    """Make tool-using language-model agents better by reinforcement learning.

    \b
    palestra train                  train the demo agent, in minutes, on a laptop
    palestra init                   write an agent of your own to start from
    palestra train my_agent.py      train an agent of your own
    palestra eval my_agent.py       score it without training
    """


def run(arguments: Sequence[str]) -> int:
    """Run one command line. Exit status: 0 success, 2 bad input (with the remedy on stderr), 130 Ctrl-C."""
    words = [word for word in arguments if word != "--debug"]
    if len(words) < len(arguments):
        os.environ["PALESTRA_DEBUG"] = "1"
    try:
        return int(cli.main(args=words, prog_name="palestra", standalone_mode=False) or 0)
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption):
            section = error.option_name.lstrip("-").partition(".")[0]
            if section in extras.SETTINGS and not extras.has_settings(section):
                error = click.UsageError(extras.missing(section, error.option_name))
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        if is_first_rank():
            click.secho("Stopped.", fg="yellow", err=True)
        return 130
    except MemoryError:
        if os.environ.get("PALESTRA_DEBUG", "0") not in ("", "0"):
            raise
        click.secho("Error: no more memory can be had; free some, or raise `ulimit -v`", fg="red", err=True)
        return 2
    except (PalestraError, OSError) as error:
        from palestra.core.files import is_unwritable
        from palestra.core.text import visible

        is_full = isinstance(error, OSError) and is_unwritable(error)
        if os.environ.get("PALESTRA_DEBUG", "0") not in ("", "0") or not (is_full or isinstance(error, PalestraError)):
            raise
        remedy = "; free some space, or choose another output_dir" if is_full else ""
        if is_first_rank() or not isinstance(error, RankFailed):
            who = "" if is_first_rank() else f"rank {os.environ['RANK']}: "
            text = visible(f"{who}Error: {error}{remedy}")  # it may quote a file or a program
            click.secho(text, fg="red", err=True)
        return 2


def main() -> None:
    """The command of this process, which ends with it; from Python, call `run`."""
    run_process(run)
