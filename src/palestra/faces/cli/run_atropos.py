"""`palestra env run-atropos FILE`: train on an unmodified atroposlib environment."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.console import Console

from palestra.core import children
from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.files import cache_folder, open_private, slug
from palestra.core.run_folder import RunFolder
from palestra.faces.cli import settings
from palestra.faces.cli.common import config_option, debug_option, json_line_option, load_libraries
from palestra.faces.cli.serve import require_serve_extra
from palestra.faces.cli.settings import EnvCommand, EnvSettings, read_settings
from palestra.faces.cli.train_wire import new_run, present, run_on_wire, wire_config
from palestra.policy.openai import OpenAISettings
from palestra.train.interrupt import sigterm_as_ctrl_c
from palestra.wire import WIRE_DEFAULTS
from palestra.wire.atropos import (
    EnvProcess,
    ensure_python,
    env_process_environment,
    process_command,
    serve_command,
    venv_folder,
    write_tokenizer,
)

_STOP_S = 10.0
_PALESTRA = [sys.executable, "-c", "from palestra.faces.cli.main import main; main()"]


@click.command("run-atropos", cls=EnvCommand, options_metavar="[OPTIONS] [--env.KEY VALUE]… [--SECTION.KEY VALUE]…")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@config_option
@click.option("--with", "packages", multiple=True, metavar="PACKAGE", help="Also install this for the environment.")
@json_line_option
@debug_option
def command(file: Path, config_file: Path | None, packages: tuple[str, ...], as_json: bool, **parameters: Any) -> None:
    """Train a model on FILE, an environment written against atroposlib's BaseEnv, as it is.

    The file runs in a venv of its own; the trajectory API, the inference server and the trainer are Palestra's.

    \b
    palestra env run-atropos gsm8k_server.py --model.name palestra/tiny --train.max_steps 5
    palestra env run-atropos my_env.py --openai.server_type vllm --env.max_token_length 512 --with sympy
    """
    require_serve_extra()
    env_settings = read_settings(config_file, settings.from_options(parameters))
    config, console = wire_config(env_settings.run), Console(stderr=as_json)
    python = _python(packages, console)
    run = new_run(config, {"env_url": ""})
    # our children have no terminal whose end they could notice
    with sigterm_as_ctrl_c(signal.SIGHUP), trajectory_process(run) as url:
        outcome = _train(run, file, python, url, env_settings, console)
    present(run, outcome, console, as_json)


def _train(run: RunFolder, file: Path, python: Path, url: str, env_settings: EnvSettings, console: Console) -> Any:
    """Start the environment once the model is served, and stop it after the training."""
    started: list[EnvProcess] = []

    def start(inference: str, tokenizer: Any) -> None:
        folder = write_tokenizer(tokenizer, run.tokenizer).resolve()
        command = _serve_command(python, file, env_settings, run.config, url, f"{inference}/v1", folder)
        started.append(EnvProcess(command, run.log_file("env"), env_process_environment(env_settings.env)))

    def check() -> None:
        for process in started:
            process.check()

    try:
        return run_on_wire(run, url, 0, console, served=start, check=check)
    finally:
        for process in started:
            process.stop()


def serve(file: Path, env_settings: EnvSettings, url: str, console: Console) -> NoReturn:
    """Replace this process by the environment, which posts to the API; the model's tokenizer is in the cache."""
    config = RunConfig.build(WIRE_DEFAULTS, env_settings.run)
    python, folder = _python((), console), _cached_tokenizer(config, console)
    inference = str(env_settings.openai.get("base_url", "http://127.0.0.1:9001/v1"))
    command = _serve_command(python, file, env_settings, config, url, inference, folder)
    os.execve(command[0], command, env_process_environment(env_settings.env))


def process(file: Path, env_settings: EnvSettings, groups: int, out: Path, console: Console) -> NoReturn:
    """Replace this process by the environment, which attempts some problems with the model at --openai.base_url."""
    import yaml

    if "base_url" not in env_settings.openai:
        raise PalestraError(
            f"{file.name} is written for atroposlib, and asks its model over HTTP; say where: --openai.base_url URL "
            "--openai.model_name NAME, for example of `palestra serve`"
        )
    config = RunConfig.build(WIRE_DEFAULTS, env_settings.run)
    python, openai = _python((), console), OpenAISettings.read(env_settings.openai)
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


def _python(packages: Sequence[str], console: Console) -> Path:
    return ensure_python(venv_folder(), packages, lambda text: console.print(text, highlight=False))


def _serve_command(
    python: Path, file: Path, env_settings: EnvSettings, config: RunConfig, url: str, inference: str, tokenizer: Path
) -> list[str]:
    env = {
        "rollout_server_url": url,
        "tokenizer_name": tokenizer,
        "group_size": config.rollout.group_size,
        "total_steps": config.train.max_steps,
        "use_wandb": False,
    }
    openai = {"base_url": inference, "model_name": tokenizer, "api_key": "none"}
    return serve_command(python, file, env | env_settings.env, openai | env_settings.openai)


@contextlib.contextmanager
def trajectory_process(run: RunFolder) -> Iterator[str]:
    """Run the trajectory API in a process of its own: it accepts groups also while the trainer computes."""
    command = [*_PALESTRA, "trajectory", "--port", "0", "--folder", str(run.wire)]
    with open_private(run.log_file("api")) as log:
        process = children.start(command, env=os.environ, stderr=log)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise PalestraError(f"the trajectory API did not start; see {run.log_file('api')}")
        yield line.split()[-1]
    finally:
        children.end(process, _STOP_S)


settings.options(command)
