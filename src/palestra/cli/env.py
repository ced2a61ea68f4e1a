"""`palestra env`: run one environment by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from palestra.cli import settings
from palestra.cli.common import load_libraries, out_option
from palestra.cli.find_run import with_model_of_run
from palestra.cli.settings import EnvCommand, read_settings
from palestra.cli.summary import capability_of, print_evaluation
from palestra.core import extras
from palestra.core.config import RunConfig
from palestra.core.files import slug, write_text
from palestra.core.show import show_path
from palestra.env_api import evaluate_env, process_env
from palestra.envs.load import find_env
from palestra.envs.running import RunningEnv
from palestra.evals.evidence import RunFacts
from palestra.evals.run_report.write import fill_template
from palestra.policy.openai import OpenAISettings
from palestra.run import open_env
from palestra.runs.request import RunRequest
from palestra.train.progress import make_display

_PAGE = Path(__file__).with_name("process_page.html")


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


@settings.command_of_run("process", cls=EnvCommand, options_metavar=settings.ENV_OPTIONS)
@click.option("--groups", default=8, show_default=True, type=click.IntRange(1), help="Problems to attempt.")
@out_option("The JSONL file; the page gets the same name with .html.")
@click.argument("name_or_file")
def process(
    name_or_file: str, config_file: Path | None, groups: int, out: Path | None, console: Console, **parameters: Any
) -> dict[str, Any]:
    """Attempt some problems; write one scored group per line, and an HTML page of them.

    \b
    palestra env process calculator
    palestra env process my_env.py --env.level 2 --model Qwen/Qwen3-0.6B --rollout.group_size 4
    palestra env process my_env.py --openai.model_name m --openai.base_url http://localhost:8000/v1

    A file written for atroposlib runs its own `process` in a venv of its own, with the model at --openai.base_url.
    """
    if (source := find_env(name_or_file)).dialect == "atropos":
        request = request_of(name_or_file, config_file, parameters)
        path = out or Path(f"{slug(source.name)}.jsonl")
        extras.provided("runs over the wire").process(source.file_path, request, groups, path)
    env, config, openai = _prepare(console, name_or_file, config_file, parameters)
    path = out or Path(f"{slug(env.name)}.jsonl")
    records: list[dict[str, Any]] = []
    with make_display(console, config.track.log_every) as display:
        process_env(env, config, path, groups=groups, openai=openai, watcher=display, on_group=records.append)
    page = path.with_suffix(".html")
    name = openai.model_name if openai else config.model.name
    values = {"environment": env.name, "model": name, "groups": [_group(record) for record in records]}
    write_text(page, fill_template(_PAGE, {}, values))
    scores = [score for record in records for score in record["scores"]]
    passed = [flag for record in records for flag in record["passed"]]
    mean = sum(scores) / len(scores)
    counts = f"{len(records)} groups, {len(scores)} attempts: mean score {mean:.2f}, {sum(passed)} passed"
    console.print(f"{counts}\n{show_path(path)}\n{show_path(page)}", highlight=False)
    summary = {"groups": len(records), "attempts": len(scores), "passed": sum(passed), "mean_score": mean}
    return {**summary, "jsonl": str(path), "page": str(page)}


def _group(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record by attempts instead of by columns; the shared opening is shown once."""
    opening = next((i for i, m in enumerate(record["messages"][0]) if m["role"] == "assistant"), None)
    columns = ("scores", "passed", "verdicts", "messages", "stops", "errors", "seconds")
    attempts = [dict(zip(columns, row, strict=True)) for row in zip(*(record[key] for key in columns), strict=True)]
    for attempt in attempts:
        attempt["messages"] = attempt["messages"][opening:]
    about = {"id": record["problem_id"], "expect": record["expect"]}
    return {**about, "opening": record["messages"][0][:opening], "attempts": attempts}


@settings.command_of_run("evaluate", cls=EnvCommand, options_metavar=settings.ENV_OPTIONS)
@click.argument("name_or_file")
def evaluate(name_or_file: str, config_file: Path | None, console: Console, **parameters: Any) -> dict[str, Any]:
    """Score a model on the held-out problems of an environment.

    \b
    palestra env evaluate calculator
    palestra env evaluate my_env.py --model runs/my-env-20260131-101500/model
    """
    env, config, openai = _prepare(console, name_or_file, config_file, parameters)
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


def _prepare(
    console: Console, name_or_file: str, config_file: Path | None, parameters: dict[str, Any]
) -> tuple[RunningEnv, RunConfig, OpenAISettings | None]:
    """The environment and all settings, checked before torch is loaded."""
    request = request_of(name_or_file, config_file, parameters, runs=True)
    env, config = open_env(request)
    openai = OpenAISettings.read(dict(request.server_settings)) if request.server_settings else None
    if openai is None:
        load_libraries(console, config.model.name)
    return env, config, openai


command.add_command(process)
command.add_command(evaluate)
