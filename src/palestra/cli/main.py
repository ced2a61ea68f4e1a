"""`palestra`: the command line. A command's module is imported when it is called, so that --help is fast."""

from __future__ import annotations

import atexit
import errno
import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from palestra.core.errors import PalestraError, did_you_mean
from palestra.core.ranks import RankFailed, is_first_rank

OBJECTS_UNTIL_COLLECTION = 50_000  # Python's own 700 means a thousand collections while torch is imported: a second

# name -> (module beside this one, or module:attribute where it is not `command`; its line in `palestra --help`)
COMMANDS = {
    "train": ("train", "Train an agent and show that it got better."),
    "eval": ("eval", "Score an agent without training."),
    "envs": ("envs", "List the available environments."),
    "env": ("env", "Run one environment: look at its rollouts, score a model on it."),
    "dashboard": ("dashboard", "Show runs, rollouts and tokens in a browser."),
    "rescore": ("rescore", "Score a run's stored rollouts with changed measures."),
    "chat": ("chat", "Chat with a trained model that has its tools."),
    "serve": ("serve", "Serve a model to any OpenAI client."),
    "gateway": ("gateway", "Serve a model to agents, and record the exact tokens of each attempt."),
    "record": ("gateway:record", "Record what an agent says to an OpenAI- or Anthropic-style API."),
    "trajectory": ("serve:trajectory", "Serve the API between environments and a trainer."),
    "tinker": ("tinker", "Serve models to the Tinker SDK: train and sample over its API."),
    "mcp": ("agent_tools:mcp", "Let an agent train models, over the Model Context Protocol."),
    "http": ("agent_tools:http", "Let an agent train models, over HTTP."),
    "tools": ("agent_tools:tools", "Print the schemas of the tools by which an agent trains models."),
    "locks": ("agent_tools:locks", "Show what an agent may not change here."),
    "runs": ("runs", "List, watch, stop, resume, compare and clean up runs."),
    "export": ("export", "Export a model: Hugging Face folder, GGUF file, Ollama."),
    "plan": ("plan", "Predict step time, memory and cost of a training."),
    "bench": ("bench", "Measure how fast a model samples on this machine."),
    "config": ("config", "Print the settings a run would use, or all settings."),
    "doctor": ("about:doctor", "Check what this machine has, and what it lacks."),
    "completion": ("about:completion", "Print the completion script of your shell."),
    "version": ("about:version", "Print the versions that matter in a bug report."),
}


class LazyGroup(click.Group):
    """A group that imports a command only when that command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(import_module(f"palestra.cli.{module}"), attribute or "command")
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0].endswith(".py"):
            raise click.UsageError(f"{args[0]} is a file, not a command. Did you mean 'palestra train {args[0]}'?", ctx)
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(f"There is no command {args[0]!r}.{did_you_mean(args[0], COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="palestra", message="palestra %(version)s", help="Print the version.")
def cli() -> None:
    """Make tool-using language-model agents better by reinforcement learning.

    \b
    palestra train                  train the demo agent, in minutes, on a laptop
    palestra train my_agent.py      train an agent of your own
    palestra eval my_agent.py       score it without training
    """


def run(arguments: Sequence[str]) -> int:
    """Run one command line. Exit status: 0 success, 2 bad input (with the remedy on stderr), 130 Ctrl-C."""
    try:
        return int(cli.main(args=list(arguments), prog_name="palestra", standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        if is_first_rank():
            click.secho("Stopped.", fg="yellow", err=True)
        return 130
    except (PalestraError, OSError) as error:
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        if os.environ.get("PALESTRA_DEBUG", "0") not in ("", "0") or not (is_full or isinstance(error, PalestraError)):
            raise
        from palestra.core.show import visible

        remedy = "; free some space, or choose another output_dir" if is_full else ""
        if is_first_rank() or not isinstance(error, RankFailed):
            who = "" if is_first_rank() else f"rank {os.environ['RANK']}: "
            text = visible(f"{who}Error: {error}{remedy}")  # it may quote a file or a program
            click.secho(text, fg="red", err=True)
        return 2


def main() -> None:
    """The command of this process, which ends with it; from Python, call `run`."""
    from palestra.core.secrets import hide_environment  # here: `palestra --help` is fast

    status = list[int]()
    atexit.register(_end_process, status)  # the first of all handlers, so the last that runs
    gc.set_threshold(OBJECTS_UNTIL_COLLECTION, *gc.get_threshold()[1:])
    hide_environment()
    status.append(run(sys.argv[1:]))
    sys.exit(status[0])


def _end_process(status: list[int]) -> None:
    """End the process as soon as its threads and exit handlers have: to free each of torch's modules takes a second.

    Not without a status, when a traceback is shown, nor under a debugger or a coverage tool, which come behind this.
    """
    if status and sys.gettrace() is None:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):  # a broken pipe, or none: Python has its own words for that
            return
        os._exit(status[0])
