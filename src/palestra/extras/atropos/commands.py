"""`palestra trajectory`, and of `palestra env`: serve, run-atropos and process."""

from __future__ import annotations

import asyncio
import itertools
import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from palestra.cli import settings
from palestra.cli.common import PATH, load_libraries, out_option, wait_limit_option
from palestra.cli.env import prepared, request_of
from palestra.cli.find_run import code_of_run, require_run, require_trust, trust_option
from palestra.cli.serve import address_options, require_serve_extra, run_server, server_port
from palestra.cli.settings import EnvCommand, read_settings
from palestra.cli.summary import print_outcome
from palestra.core.config import RunConfig
from palestra.core.errors import SettingError, StateError, UnreadableFileError
from palestra.core.files import slug, write_text
from palestra.core.messages import to_dict
from palestra.core.run_folder import RunFolder
from palestra.core.text import show_path, visible
from palestra.core.time_limit import outside_event_loop
from palestra.env_api import collectors
from palestra.envs.discover import find_env
from palestra.envs.running import RunningEnv
from palestra.evals.findings import recorded_findings
from palestra.evals.run_report.write import fill_template
from palestra.extras.atropos import WIRE_DEFAULTS
from palestra.extras.atropos.atropos import AtroposEnv
from palestra.extras.atropos.columns import group_to_dict
from palestra.extras.atropos.runs import serve_environment, wire_config
from palestra.policy.openai import OpenAISettings
from palestra.rollout.collect import require_one_good
from palestra.runs.index import refuse_busy
from palestra.runs.manager import Run, RunManager
from palestra.runs.request import refuse_secrets
from palestra.train.progress import make_display, task
from palestra.train.watcher import Watcher, sigterm_as_ctrl_c

_PAGE = Path(__file__).with_name("process_page.html")


@click.command("trajectory")
@address_options(8001)
@click.option("--folder", type=PATH, default="trajectories", show_default=True, help="For groups.")
@click.option("--max-waiting", default=65_536, show_default=True, help="Sequences that may be queued for the trainer.")
@click.option("--max-waiting-mib", default=4096, show_default=True, help="What they may take on disk.")
@click.option("--max-body-mib", default=128, show_default=True, help="The largest request, decompressed.")
def trajectory(host: str, port: int, token: str | None, folder: Path, **limits: int) -> None:
    """Serve the trajectory API: environments post scored groups, a trainer takes batches of them.

    \b
    palestra trajectory
    palestra train --env-url http://127.0.0.1:8001 --model.name palestra/tiny --train.max_steps 10

    Accepted groups are on disk before the answer is sent, and survive a restart.
    """
    socket = server_port(host, port, token)
    from palestra.extras.atropos.server import trajectory_app

    run_server(trajectory_app(folder, token=token, **limits), socket, "the trajectory API is at")


@settings.command_of_run("serve", cls=EnvCommand, options_metavar=settings.ENV_OPTIONS)
@click.option("--api-url", default="http://127.0.0.1:8001", show_default=True, help="The trajectory API to post to.")
@click.argument("name_or_file")
def serve(
    name_or_file: str, config_file: Path | None, api_url: str, console: Console, **parameters: Any
) -> dict[str, Any]:
    """Post to a trainer over HTTP: sample from the model that it serves, score, post, until its last step.

    In three terminals, in any order; several environments may serve one trainer:

    \b
    palestra trajectory
    palestra train --env-url http://127.0.0.1:8001 --model.name palestra/tiny --train.max_steps 100
    palestra env serve my_env.py

    Both sides need the same --rollout.group_size and --rollout.temperature. The trainer's model is expected
    at --openai.base_url (http://127.0.0.1:9001/v1); its tokenizer is loaded by the name it is served under, or
    by --model. If the servers require a token, set PALESTRA_TOKEN. A file written for atroposlib is started
    in a venv of its own.
    """
    request = request_of(name_or_file, config_file, parameters)

    @contextmanager
    def watching(config: RunConfig) -> Iterator[Watcher]:
        load_libraries(console, config.model.name)
        with make_display(console, config.track.log_every) as display:
            yield display

    fed = serve_environment(replace(request, env_url=api_url), watching)
    mean = sum(fed.scores) / max(1, len(fed.scores))
    console.print(f"{fed.posted_groups} groups posted, mean score {mean:.2f}", highlight=False)
    return {"groups": fed.posted_groups, "attempts": len(fed.scores), "mean_score": mean}


@settings.command_of_run("run-atropos", cls=EnvCommand, options_metavar=settings.ENV_OPTIONS)
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False), required=False)
@click.option("--with", "packages", multiple=True, metavar="PACKAGE", help="Also install this for the environment.")
@wait_limit_option
@click.option("--resume", metavar="RUN", help="Continue a run that was stopped: its id, name or folder.")
@trust_option
def run_atropos(
    file: Path | None,
    config_file: Path | None,
    packages: tuple[str, ...],
    wait_limit_s: float,
    resume: str | None,
    trust: bool,
    console: Console,
    **parameters: Any,
) -> dict[str, Any]:
    """Train a model on FILE, an environment written against atroposlib's BaseEnv, as it is.

    The file runs in a venv of its own; the trajectory API, the inference server and the trainer are Palestra's.
    Ctrl-C stops the run; `palestra runs` shows it, too.

    \b
    palestra env run-atropos gsm8k_server.py --model.name palestra/tiny --train.max_steps 5
    palestra env run-atropos my_env.py --env.max_token_length 512 --with sympy==1.13.1
    palestra env run-atropos --resume runs/wire-20260131-101500
    """
    require_serve_extra()
    read = read_settings(config_file, settings.from_options(parameters))
    manager, log_size = RunManager(), 0
    if resume is not None:
        if file is not None or packages or read.env_settings or read.server_settings:
            raise SettingError("a resumed run keeps its file, its packages and its settings; leave them out")
        max_steps = settings.max_steps_of_resumed(read.settings, config_file)
        run_id = _resumable(manager, resume, trust)
        log = manager.folder(run_id).log_file("trainer")
        log_size = log.stat().st_size if log.is_file() else 0
        run = manager.resume(run_id, max_steps=max_steps)
    elif file is not None:
        for kind, values in (("--env", read.env_settings), ("--openai", read.server_settings)):
            refuse_secrets(values, kind)
        own = {"output_dir": str(Path("runs").absolute()), **read.settings}
        about: dict[str, Any] = {"environment": str(file.resolve()), "packages": packages, "name": "wire"}
        request = replace(read, settings=own, wait_limit_s=wait_limit_s, **about)
        wire_config(request)
        with task(console, "preparing the environment's venv"):
            AtroposEnv.of(request).python(lambda text: console.print(text, highlight=False))
        run = manager.start(request)
    else:
        raise SettingError("which environment? Give its FILE, or --resume RUN")
    _follow(manager, run, console, log_size)
    from palestra.train.run import Outcome

    folder = RunFolder.open(run.folder)
    findings = tuple(recorded_findings(folder, ended=True))
    outcome = Outcome(
        None, None, folder.model, None, None, folder.metrics(), folder.elapsed_s(), folder.report_page, findings
    )
    return print_outcome(console, folder, outcome)


def _resumable(manager: RunManager, name: str, trust: bool) -> str:
    """The id of a run over the wire with an Atropos environment."""
    run = require_run(name)
    require_trust(run, code_of_run(run.record), trust)
    refuse_busy(run.path)
    if not run.request_file.is_file() and "atropos" not in run.record:
        command = run.wire_command or f"palestra train --resume {name}"
        raise UnreadableFileError(f"{run.path} does not say which Atropos environment it had; run: {command}")
    return manager.adopt(run)


def _follow(manager: RunManager, run: Run, console: Console, log_size: int) -> None:
    """Print the trainer's log, from `log_size` bytes on, until the run has ended; Ctrl-C stops the run."""
    try:
        with sigterm_as_ctrl_c():
            for line in manager.follow(run.run_id, start=log_size):
                click.echo(visible(line), nl=False, err=console.stderr)
    except KeyboardInterrupt:
        click.secho("\nStopping after this step.", fg="yellow", err=True)
        manager.stop(run.run_id, wait_s=900.0)
        folder = shlex.quote(show_path(run.folder))
        click.echo(f"Continue with:\n  palestra env run-atropos --resume {folder}", err=True)
        raise click.exceptions.Exit(130) from None
    ended = manager.get(run.run_id)
    if ended.state != "completed":
        raise StateError(f"the run {ended.run_id} is {ended.state}: {ended.reason or 'it was stopped'}")


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
        AtroposEnv.of(request).process(request.config(WIRE_DEFAULTS), groups, path)
    env, config, openai = prepared(console, name_or_file, config_file, parameters)
    path = out or Path(f"{slug(env.name)}.jsonl")
    with make_display(console, config.track.log_every) as display:
        records = process_env(env, config, path, groups=groups, openai=openai, watcher=display)
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
    env: RunningEnv, config: RunConfig, path: Path, *, groups: int, openai: OpenAISettings | None, watcher: Watcher
) -> list[dict[str, Any]]:
    """Attempt the first training problems and write one scored group a line, each as soon as it is there.

    Tokens, masks and logprobs are empty for a chat endpoint.
    """
    config = config.with_step_size()
    size, at_once = config.rollout.group_size, config.train.problems_per_step
    problems, records, done = env.problems("train")[:groups], list[dict[str, Any]](), itertools.count(1)
    watcher.phase("attempting", len(problems) * size)

    async def write() -> None:
        collector = collectors(config, openai, training=True)[0](env)
        with path.open("w", encoding="utf-8") as file:
            for start in range(0, len(problems), at_once):
                some = problems[start : start + at_once]
                keys = [f"process/{config.seed}/{problem.id}" for problem in some]
                found = await collector.collect(some, size, keys, lambda rollout: watcher.advance(next(done), {}))
                require_one_good(found)
                for problem, group in zip(some, found, strict=True):
                    text = problem.input if isinstance(problem.input, str) else [to_dict(m) for m in problem.input]
                    records.append({"input": text, "expect": problem.expect} | group_to_dict(group))
                    file.write(json.dumps(records[-1], ensure_ascii=False, default=str) + "\n")
                    file.flush()

    outside_event_loop(lambda: asyncio.run(write()))
    return records
