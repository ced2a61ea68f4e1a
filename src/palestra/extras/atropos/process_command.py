"""`palestra env process`: scored groups as JSON lines, and a page of them."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from palestra.cli import settings
from palestra.cli.common import out_option
from palestra.cli.env import prepared, request_of
from palestra.cli.settings import EnvCommand
from palestra.core.config import RunConfig
from palestra.core.files import slug, write_text
from palestra.core.messages import to_dict
from palestra.core.text import show_path
from palestra.core.time_limit import outside_event_loop
from palestra.core.types import Problem
from palestra.env_api import collectors
from palestra.envs.discover import find_env
from palestra.envs.running import RunningEnv
from palestra.evals.run_report.write import fill_template
from palestra.extras.atropos.columns import group_to_dict
from palestra.extras.atropos.runs import process as process_file
from palestra.policy.openai import OpenAISettings
from palestra.rollout.collect import OnRollout, require_one_good
from palestra.rollout.evaluate import GroupCollector
from palestra.train.progress import make_display
from palestra.train.watcher import Watcher

_PAGE = Path(__file__).with_name("process_page.html")


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
        process_file(source.file_path, request, groups, path)
    env, config, openai = prepared(console, name_or_file, config_file, parameters)
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


def process_env(
    env: RunningEnv,
    config: RunConfig,
    path: Path,
    *,
    groups: int,
    openai: OpenAISettings | None = None,
    watcher: Watcher | None = None,
    on_group: Callable[[dict[str, Any]], None] = lambda record: None,
) -> None:
    """Attempt the first training problems and write one scored group a line, each as soon as it is there."""
    config = config.with_step_size()
    problems = env.problems("train")[:groups]
    watch, done = watcher or Watcher(), itertools.count(1)
    watch.phase("attempting", len(problems) * config.rollout.group_size)

    async def write() -> None:
        records = scored_groups(
            collectors(config, openai, training=True)[0](env),
            problems,
            group_size=config.rollout.group_size,
            seed=config.seed,
            at_once=config.train.problems_per_step,
            on_rollout=lambda rollout: watch.advance(next(done), {}),
        )
        with path.open("w", encoding="utf-8") as file:
            async for record in records:
                file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
                file.flush()
                on_group(record)

    outside_event_loop(lambda: asyncio.run(write()))


async def scored_groups(
    collector: GroupCollector,
    problems: Sequence[Problem],
    *,
    group_size: int,
    seed: int,
    at_once: int,
    on_rollout: OnRollout = lambda r: None,
) -> AsyncIterator[dict[str, Any]]:
    """The columns of one group after the other, with its problem; `at_once` problems are attempted together.

    Tokens, masks and logprobs are empty for a chat endpoint.
    """
    for start in range(0, len(problems), at_once):
        some = problems[start : start + at_once]
        keys = [f"process/{seed}/{problem.id}" for problem in some]
        groups = await collector.collect(some, group_size, keys, on_rollout)
        require_one_good(groups)
        for problem, group in zip(some, groups, strict=True):
            text = problem.input if isinstance(problem.input, str) else [to_dict(m) for m in problem.input]
            yield {"input": text, "expect": problem.expect} | group_to_dict(group)
