"""`palestra env`: run one environment by itself; `palestra envs`: the available environments."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from palestra.cli import settings
from palestra.cli.common import load_libraries, print_sections, returns_data
from palestra.cli.find_run import with_model_of_run
from palestra.cli.settings import EnvCommand, read_settings
from palestra.cli.summary import capability_of, print_evaluation
from palestra.core import extras
from palestra.core.config import RunConfig
from palestra.env_api import evaluate_env
from palestra.envs.discover import discover
from palestra.envs.running import RunningEnv
from palestra.evals.evidence import RunFacts
from palestra.policy.openai import OpenAISettings
from palestra.run import open_env
from palestra.runs.request import RunRequest
from palestra.train.progress import make_display


class EnvGroup(click.Group):
    """The commands below, and those of extras."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *(n.removeprefix("env ") for n in extras.COMMANDS if n.startswith("env "))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if (name := f"env {cmd_name}") in extras.COMMANDS:
            return extras.command(name)
        return super().get_command(ctx, cmd_name)


@click.group("env", cls=EnvGroup)
def command() -> None:
    """One environment: `process` writes scored rollouts, `evaluate` scores a model, `serve` posts to a trainer."""


@settings.command_of_run("evaluate", cls=EnvCommand, options_metavar=settings.ENV_OPTIONS)
@click.argument("name_or_file")
def evaluate(name_or_file: str, config_file: Path | None, console: Console, **parameters: Any) -> dict[str, Any]:
    """Score a model on the held-out problems of an environment.

    \b
    palestra env evaluate calculator
    palestra env evaluate my_env.py --model runs/my-env-20260131-101500/model
    """
    env, config, openai = prepared(console, name_or_file, config_file, parameters)
    with make_display(console, config.track.log_every) as display:
        report, more = evaluate_env(env, config, openai=openai, watcher=display)
    cases, held_out = len({rollout.problem_id for rollout in report.rollouts}), bool(env.problems("held_out"))
    facts = RunFacts(config, "agent" if openai is None else "endpoint")
    title = f"{env.name}, {cases} {'held-out' if held_out else 'training'} problems"
    print_evaluation(console, title, report, facts)
    for name, value in more.items():
        console.print(f"{name} {value:g}", highlight=False)
    return {**report.to_dict(), "capability": capability_of(report).to_dict(), "more": more}


def request_of(
    name_or_file: str, config_file: Path | None, parameters: dict[str, Any], *, runs: bool = False
) -> RunRequest:
    """The environment and the settings of a command; with `runs`, --model may name a run."""
    options = settings.from_options(parameters)
    request = read_settings(config_file, with_model_of_run(options) if runs else options)
    return replace(request, environment=name_or_file)


def prepared(
    console: Console, name_or_file: str, config_file: Path | None, parameters: dict[str, Any]
) -> tuple[RunningEnv, RunConfig, OpenAISettings | None]:
    """The environment and all settings, checked before torch is loaded."""
    request = request_of(name_or_file, config_file, parameters, runs=True)
    env, config = open_env(request)
    openai = OpenAISettings.read(dict(request.server_settings)) if request.server_settings else None
    if openai is None:
        load_libraries(console, config.model.name)
    return env, config, openai


@click.command("envs")
@click.option("--path", "paths", multiple=True, type=click.Path(exists=True), help="Search this folder or file too.")
@click.option("--all", "show_all", is_flag=True, help="List every dataset of a family such as reasoning_gym.")
@returns_data
def envs(paths: tuple[str, ...], show_all: bool, console: Console) -> dict[str, Any]:
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


command.add_command(evaluate)
