"""`palestra env run-atropos FILE`: train on an unmodified atroposlib environment."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from palestra.core.errors import PalestraError
from palestra.faces.cli import settings
from palestra.faces.cli.env_settings import EnvCommand, EnvSettings, read_settings

if TYPE_CHECKING:
    from rich.console import Console

    from palestra.core.config import RunConfig
    from palestra.runs.store import RunFolder

_PALESTRA = [sys.executable, "-c", "from palestra.faces.cli.main import main; main()"]


@click.command("run-atropos", cls=EnvCommand, options_metavar="[OPTIONS] [--env.KEY VALUE]… [--SECTION.KEY VALUE]…")
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--config", "config_file", type=click.Path(path_type=Path), metavar="FILE", help="Settings from YAML.")
@click.option("--with", "packages", multiple=True, metavar="PACKAGE", help="Also install this for the environment.")
@click.option("--json", "as_json", is_flag=True, help="End stdout with one line of JSON; all else goes to stderr.")
@settings.debug_option
def command(file: Path, config_file: Path | None, packages: tuple[str, ...], as_json: bool, **parameters: Any) -> None:
    """Train a model on FILE, an environment written against atroposlib's BaseEnv, as it is.

    The file runs in a venv of its own; the trajectory API, the inference server and the trainer are Palestra's.

    \b
    palestra env run-atropos gsm8k_server.py --model.name palestra/tiny --train.max_steps 5
    palestra env run-atropos my_env.py --openai.server_type vllm --env.max_token_length 512 --with sympy
    """
    from rich.console import Console

    from palestra.core.config import RunConfig
    from palestra.faces.cli.serve import require_serve_extra
    from palestra.faces.cli.train_wire import WIRE_DEFAULTS, new_run, present

    require_serve_extra()
    read = read_settings(config_file, settings.given(parameters))
    config = RunConfig.build(WIRE_DEFAULTS, read.run)
    if config.train.max_steps is None:
        raise PalestraError("such an environment has no last problem; say when to stop: --train.max_steps 100")
    console = Console(stderr=as_json)
    python = _python(packages, console)
    run = new_run(config, "")
    with trajectory_process(run) as url:
        outcome = _train(run, config, file, python, url, read, console)
    present(run, outcome, console, as_json)


def _train(
    run: RunFolder, config: RunConfig, file: Path, python: Path, url: str, read: EnvSettings, console: Any
) -> Any:
    """The environment starts when the model is served, and ends with the training."""
    from palestra.faces.cli.train_wire import run_on_wire
    from palestra.wire.atropos import EnvProcess, write_tokenizer

    started: list[EnvProcess] = []

    def start(inference: str, tokenizer: Any) -> None:
        folder = write_tokenizer(tokenizer, run.path / "tokenizer").resolve()
        words = _serve_words(python, file, read, config, url, f"{inference}/v1", folder)
        started.append(EnvProcess(words, run.path / "environment.log"))

    def check() -> None:
        for process in started:
            process.check()

    try:
        return run_on_wire(run, url, 0, console, served=start, check=check)
    finally:
        for process in started:
            process.stop()


def serve(file: Path, read: EnvSettings, url: str, console: Console) -> NoReturn:
    """Become the environment's program, feeding a trainer elsewhere; the model's tokenizer lies in the cache."""
    from palestra.core.config import RunConfig
    from palestra.faces.cli.libraries import load_libraries
    from palestra.faces.cli.train_wire import WIRE_DEFAULTS
    from palestra.runs.store import plain_name
    from palestra.wire.atropos import cache_folder, write_tokenizer

    config = RunConfig.build(WIRE_DEFAULTS, read.run)
    python = _python((), console)
    load_libraries(console, config.model.name)
    from palestra.models.loading import load_tokenizer

    where = cache_folder() / "tokenizers" / plain_name(config.model.name)
    folder = write_tokenizer(load_tokenizer(config.model.name), where)
    inference = str(read.openai.get("base_url", "http://127.0.0.1:9001/v1"))
    words = _serve_words(python, file, read, config, url, inference, folder)
    quiet = {name: value for name, value in os.environ.items() if name != "PALESTRA_TOKEN"}
    os.execve(words[0], words, quiet | {"PYTHONUNBUFFERED": "1"})


def _python(packages: Sequence[str], console: Console) -> Path:
    from palestra.wire.atropos import cache_folder, ensure_python

    name = f"atropos-0.4.0-py{sys.version_info.major}.{sys.version_info.minor}"
    return ensure_python(cache_folder() / name, packages, lambda text: console.print(text, highlight=False))


def _serve_words(
    python: Path, file: Path, read: EnvSettings, config: RunConfig, url: str, inference: str, tokenizer: Path
) -> list[str]:
    from palestra.wire.atropos import serve_command

    env = {
        "rollout_server_url": url,
        "tokenizer_name": tokenizer,
        "group_size": config.rollout.group_size,
        "total_steps": config.train.max_steps,
        "use_wandb": False,
    }
    openai = {"base_url": inference, "model_name": tokenizer, "api_key": "none"}
    return serve_command(python, file, env | read.env, openai | read.openai)


@contextlib.contextmanager
def trajectory_process(run: RunFolder) -> Iterator[str]:
    """The trajectory API as a process of its own: it takes groups also while the trainer computes."""
    from palestra.wire.atropos import stop

    words = [*_PALESTRA, "trajectory", "--port", "0", "--folder", str(run.path / "wire")]
    with (run.path / "trajectory.log").open("w") as log:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise PalestraError(f"the trajectory API did not start; see {run.path / 'trajectory.log'}")
        yield line.split()[-1]
    finally:
        stop(process)


settings.options(command)
