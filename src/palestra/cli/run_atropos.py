"""`palestra env run-atropos FILE`: train on an unmodified atroposlib environment."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console

from palestra.cli import settings
from palestra.cli.common import config_option, debug_option, json_line_option, load_libraries
from palestra.cli.find_run import require_run
from palestra.cli.serve import require_serve_extra
from palestra.cli.settings import EnvCommand, EnvSettings, read_settings
from palestra.cli.train_wire import new_run, present, run_on_wire, wait_limit_option, wire_config
from palestra.cli.trust import code_of_run, require_trust, trust_option
from palestra.core import children
from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.files import cache_folder, open_private, slug
from palestra.core.run_folder import Resume, RunFolder
from palestra.policy.openai import OpenAISettings
from palestra.runs.foreground import refuse_busy
from palestra.runs.request import PALESTRA, refuse_secrets
from palestra.sources.wire import WIRE_DEFAULTS
from palestra.sources.wire.atropos import (
    EnvProcess,
    ensure_python,
    env_process_environment,
    process_command,
    serve_command,
    venv_folder,
    write_tokenizer,
)
from palestra.train.interrupt import sigterm_as_ctrl_c
from palestra.train.progress import task

_STOP_S = 10.0


@dataclass(frozen=True)
class AtroposEnv:
    """An environment's file, and what it was started with; run.json keeps it for --resume."""

    file: str
    env: Mapping[str, Any]
    openai: Mapping[str, Any]
    packages: Sequence[str]

    def python(self, console: Console) -> Path:
        folder = venv_folder(self.packages)
        with task(console, "preparing the environment's venv"):
            return ensure_python(folder, self.packages, lambda text: console.print(text, highlight=False))

    def command(
        self, python: Path, config: RunConfig, steps: int | None, url: str, inference: str, tokenizer: Path
    ) -> list[str]:
        env = {
            "rollout_server_url": url,
            "tokenizer_name": tokenizer,
            "group_size": config.rollout.group_size,
            "total_steps": steps,
            "use_wandb": False,
        }
        # the server type that gives token ids and logprobs, whatever the file names
        openai = {"base_url": inference, "model_name": tokenizer, "api_key": "none", "server_type": "sglang"}
        return serve_command(python, Path(self.file), {**env, **self.env}, {**openai, **self.openai})


@click.command("run-atropos", cls=EnvCommand, options_metavar="[OPTIONS] [--env.KEY VALUE]… [--SECTION.KEY VALUE]…")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False), required=False)
@config_option
@click.option("--with", "packages", multiple=True, metavar="PACKAGE", help="Also install this for the environment.")
@wait_limit_option
@click.option("--resume", metavar="RUN", help="Continue a run that was stopped: its id, name or folder.")
@trust_option
@json_line_option
@debug_option
def command(
    file: Path | None,
    config_file: Path | None,
    packages: tuple[str, ...],
    wait_limit_s: float,
    resume: str | None,
    trust: bool,
    as_json: bool,
    **parameters: Any,
) -> None:
    """Train a model on FILE, an environment written against atroposlib's BaseEnv, as it is.

    The file runs in a venv of its own; the trajectory API, the inference server and the trainer are Palestra's.

    \b
    palestra env run-atropos gsm8k_server.py --model.name palestra/tiny --train.max_steps 5
    palestra env run-atropos my_env.py --env.max_token_length 512 --with sympy==1.13.1
    palestra env run-atropos --resume runs/wire-20260131-101500
    """
    require_serve_extra()
    read, console = read_settings(config_file, settings.from_options(parameters)), Console(stderr=as_json)
    resumed = None
    if resume is not None:
        resumed, environment = _reopen(resume, file, packages, config_file, read, trust)
        run = RunFolder.open(resumed.folder)
    elif file is not None:
        run, environment = _start(file, packages, read, console)
    else:
        raise PalestraError("which environment? Give its FILE, or --resume RUN")
    # our children have no terminal whose end they could notice
    with sigterm_as_ctrl_c(signal.SIGHUP), trajectory_process(run) as url:
        outcome = _train(run, environment, url, console, wait_limit_s, resumed)
    present(run, outcome, console, as_json)


def _start(file: Path, packages: Sequence[str], read: EnvSettings, console: Console) -> tuple[RunFolder, AtroposEnv]:
    """A new run, once its settings are right and what it needs is installed."""
    config, environment = wire_config(read.run), AtroposEnv(str(file.resolve()), read.env, read.openai, packages)
    for kind in ("env", "openai"):
        refuse_secrets(getattr(environment, kind), f"--{kind}")
    environment.python(console)
    return new_run(config, {"env_url": "", "atropos": asdict(environment)}), environment


def _reopen(
    name: str, file: Path | None, packages: Sequence[str], config_file: Path | None, read: EnvSettings, trust: bool
) -> tuple[Resume, AtroposEnv]:
    """A run that was stopped, with the environment that it had; more steps are all that may be changed."""
    run = require_run(name)
    require_trust(run, code_of_run(run.record), trust)
    refuse_busy(run.path)
    if (record := run.record.get("atropos")) is None:
        command = run.wire_command or f"palestra train --resume {name}"
        raise PalestraError(f"{run.path} does not say which Atropos environment it had; continue it with: {command}")
    if file is not None or packages or read.env or read.openai:
        raise PalestraError("a resumed run keeps its file, its packages and its settings; leave them out")
    return Resume(run.path, max_steps=settings.max_steps_of_resumed(read.run, config_file)), AtroposEnv(**record)


def _train(
    run: RunFolder, environment: AtroposEnv, url: str, console: Console, wait_limit_s: float, resume: Resume | None
) -> Any:
    """Start the environment once the model is served, and stop it after the training."""
    started: list[EnvProcess] = []
    python = environment.python(console)
    steps = (resume and resume.max_steps) or run.config.train.max_steps

    def start(inference: str, tokenizer: Any) -> None:
        folder = write_tokenizer(tokenizer, run.tokenizer).resolve()
        command = environment.command(python, run.config, steps, url, f"{inference}/v1", folder)
        started.append(EnvProcess(command, run.log_file("env"), env_process_environment(environment.env)))

    def check() -> None:
        for process in started:
            process.check()

    try:
        return run_on_wire(
            run,
            url,
            0,
            console,
            continued_by="palestra env run-atropos",
            token=None,
            wait_limit_s=wait_limit_s,
            resume=resume,
            served=start,
            check=check,
        )
    finally:
        for process in started:
            process.stop()


def serve(file: Path, read: EnvSettings, url: str, console: Console) -> NoReturn:
    """Replace this process by the environment, which posts to the API; the model's tokenizer is in the cache."""
    config = RunConfig.build(WIRE_DEFAULTS, read.run)
    environment = AtroposEnv(str(file), read.env, read.openai, ())
    python, folder = environment.python(console), _cached_tokenizer(config, console)
    inference = str(read.openai.get("base_url", "http://127.0.0.1:9001/v1"))
    command = environment.command(python, config, config.train.max_steps, url, inference, folder)
    os.execve(command[0], command, env_process_environment(read.env))


def process(file: Path, env_settings: EnvSettings, groups: int, out: Path, console: Console) -> NoReturn:
    """Replace this process by the environment, which attempts some problems with the model at --openai.base_url."""
    import yaml

    if "base_url" not in env_settings.openai:
        raise PalestraError(
            f"{file.name} is written for atroposlib, and asks its model over HTTP; say where: --openai.base_url URL "
            "--openai.model_name NAME, for example of `palestra serve`"
        )
    config = RunConfig.build(WIRE_DEFAULTS, env_settings.run)
    environment, openai = AtroposEnv(str(file), {}, {}, ()), OpenAISettings.read(env_settings.openai)
    python = environment.python(console)
    env = {
        "tokenizer_name": str(_cached_tokenizer(config, console)),
        "group_size": config.rollout.group_size,
        "use_wandb": False,
        **env_settings.env,
        "total_steps": groups,
        "data_path_to_save_groups": str(out.resolve()),
    }
    server = {
        "model_name": openai.model_name,
        "base_url": openai.base_url,
        "api_key": os.environ.get(openai.api_key_env, "none"),
        "timeout": int(openai.timeout_s),
        "num_max_requests_at_once": openai.max_concurrent,
        "server_type": "openai",
        "health_check": False,  # it would ask the model every second
    }
    settings = out.with_suffix(".atropos.yaml")
    settings.unlink(missing_ok=True)
    with open_private(settings) as written:
        written.write(yaml.safe_dump({"env": env, "openai": server}).encode())
    command = process_command(python, file, settings.resolve())
    os.execve(command[0], command, env_process_environment(env))


def _cached_tokenizer(config: RunConfig, console: Console) -> Path:
    """The model's tokenizer, in a form and at a place that the environment's own Python reads."""
    load_libraries(console, config.model.name)
    from palestra.models.loading import load_tokenizer

    folder = cache_folder() / "tokenizers" / slug(config.model.name)
    return write_tokenizer(load_tokenizer(config.model.name), folder)


@contextlib.contextmanager
def trajectory_process(run: RunFolder) -> Iterator[str]:
    """Run the trajectory API in a process of its own: it accepts groups also while the trainer computes."""
    command = [*PALESTRA, "trajectory", "--port", "0", "--folder", str(run.wire)]
    # environments of others cannot be given a token
    environ = {name: value for name, value in os.environ.items() if name != "PALESTRA_TOKEN"}
    with open_private(run.log_file("api")) as log:
        process = children.start(command, env=environ, stderr=log)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise PalestraError(f"the trajectory API did not start; see {run.log_file('api')}")
        yield line.split()[-1]
    finally:
        children.end(process, _STOP_S)


settings.options(command)
