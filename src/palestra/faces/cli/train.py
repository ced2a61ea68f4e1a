"""`palestra train`: train an agent, and compare before and after."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from palestra.core.errors import PalestraError
from palestra.faces.cli import settings
from palestra.faces.cli.env_settings import EnvCommand

if TYPE_CHECKING:
    from rich.console import Console

    from palestra.agents.agent import Agent
    from palestra.core.config import RunConfig
    from palestra.envs.running import RunningEnv
    from palestra.faces.cli.agent_file import AgentFile
    from palestra.result import GRPOTrainingResult
    from palestra.train.loop import Watcher


@dataclass(frozen=True)
class PreparedRun:
    """The config of a run, and the function that trains it."""

    config: RunConfig
    train: Callable[[Watcher], GRPOTrainingResult]


@click.command(
    "train",
    cls=EnvCommand,
    context_settings={"max_content_width": 100},
    options_metavar="[OPTIONS] [--SECTION.KEY VALUE]…",
)
@click.argument("agent_file", required=False)
@click.option("--env", metavar="NAME_OR_FILE", help="Train on an environment instead; `palestra envs` lists them.")
@click.option("--env-url", metavar="URL", help="Train on what environments post to the trajectory API at this URL.")
@click.option("--folder", type=click.Path(path_type=Path), help="Use this as the run folder, instead of a new one.")
@click.option("--detach", is_flag=True, help="Train in the background; `palestra runs` shows its progress.")
@click.option("--wire", is_flag=True, help="With --detach: run the environment in a process of its own.")
@click.option("--serve-port", default=9001, show_default=True, help="With --env-url: where environments sample.")
@click.option("--config", "config_file", type=click.Path(path_type=Path), metavar="FILE", help="Settings from YAML.")
@click.option("--resume", metavar="RUN", help="Continue a run that was stopped: its id, name or folder.")
@click.option("--json", "as_json", is_flag=True, help="End stdout with one line of JSON; all else goes to stderr.")
@settings.debug_option
def command(
    agent_file: str | None,
    env: str | None,
    env_url: str | None,
    folder: Path | None,
    detach: bool,
    wire: bool,
    serve_port: int,
    config_file: Path | None,
    resume: str | None,
    as_json: bool,
    **parameters: Any,
) -> None:
    """Train an agent on its suite, with its measures as the reward; then compare before and after.

    AGENT_FILE is a Python file that defines `agent` and `suite`, and may define `held_out`, `measures`,
    `reward_weights` and `config`. Without one, the demo agent is trained.

    \b
    Examples:
      palestra train
      palestra train my_agent.py --seed 1
      palestra train my_agent.py --train.learning_rate 2e-5 --train.max_steps 100 --lora.r 8
      palestra train my_agent.py --config run.yaml --model.name Qwen/Qwen3-0.6B
      palestra train --env calculator --env.operations 1
      palestra train my_agent.py --detach
      palestra train --env-url http://127.0.0.1:8001 --model.name palestra/tiny --train.max_steps 20
      palestra train --resume runs/my-agent-20260131-101500
      palestra train --resume runs/my-agent-20260131-101500 --train.max_steps 200

    Every setting of a run is an option, --section.key, with the sections model, train, rollout, lora, echo,
    eval, checkpoint and track. `palestra config --keys` lists them all. The command line wins over the YAML
    file, and that over the agent file's own config.
    """
    from rich.console import Console

    console = Console(stderr=as_json)
    if env is not None and agent_file is not None:
        raise PalestraError(f"train on the agent file {agent_file} or on the environment {env}, not on both")
    options = settings.from_options(parameters)
    if detach:
        from palestra.faces.cli.detach import detach as start

        if resume or env_url or folder:
            raise PalestraError(
                "--detach starts a new run in a folder of its own; `palestra runs resume` continues one"
            )
        start(agent_file, env, config_file, options, wire or None, console, as_json)
        return
    if env_url is not None:
        from palestra.faces.cli.train_wire import Wire, train_on_url

        if agent_file is not None:
            raise PalestraError(f"train on what comes from {env_url} or on {agent_file}, not on both")
        wired = Wire(env_url, serve_port, env, folder)
        train_on_url(wired, config_file, options, resume, console, as_json)
        return
    if resume is None and env is not None:
        prepared = _on_environment(env, config_file, options, folder)
    elif resume is None:
        prepared = _new(agent_file, config_file, options, folder)
    else:
        prepared = _resumed(agent_file, resume, settings.max_steps_of_resumed(options, config_file))
    result = _train(prepared, console)
    _present(result, console, as_json)


def _new(agent_file: str | None, config_file: Path | None, options: dict[str, Any], folder: Path | None) -> PreparedRun:
    from palestra.core.yaml_config import read_yaml_config
    from palestra.faces.cli.agent_file import configure, load_agent_file

    layer = read_yaml_config(config_file) if config_file else {}
    file = load_agent_file(agent_file)
    agent, config = configure(file, layer, options)
    return _on_file(file, agent, config, folder=folder)


def _on_file(
    file: AgentFile, agent: Agent, config: RunConfig, *, folder: Path | None = None, resume: Path | None = None
) -> PreparedRun:
    def train(watcher: Watcher) -> GRPOTrainingResult:
        from palestra.api import train_grpo

        return train_grpo(
            agent,
            file.suite,
            file.measures,
            config=config,
            reward_weights=file.reward_weights,
            held_out=file.held_out,
            watcher=watcher,
            source=file.source,
            folder=folder,
            resume=resume,
        )

    return PreparedRun(config, train)


def _on_environment(name: str, config_file: Path | None, options: dict[str, Any], folder: Path | None) -> PreparedRun:
    from palestra.faces.cli.env import open_env

    env, config, read = open_env(name, config_file, options)
    where = str(Path(name).resolve()) if name.endswith(".py") else name
    return _train_env(env, config, {"environment": {"name": where, "settings": read.env}}, folder=folder)


def _train_env(
    env: RunningEnv,
    config: RunConfig,
    record: dict[str, Any],
    *,
    folder: Path | None = None,
    resume: Path | None = None,
) -> PreparedRun:
    def train(watcher: Watcher) -> GRPOTrainingResult:
        from palestra.env_api import train_env

        return train_env(env, config, watcher=watcher, record=record, folder=folder, resume=resume)

    return PreparedRun(config, train)


def _resumed(agent_file: str | None, name: str, max_steps: int | None) -> PreparedRun:
    from palestra.faces.cli.agent_file import load_agent_file
    from palestra.faces.cli.find_run import require_run
    from palestra.runs.foreground import refuse_busy

    run = require_run(name)
    refuse_busy(run.path)
    if "environment" in run.record:
        from palestra.envs.load import load_env

        environment = run.record["environment"]
        env = load_env(environment["name"], environment["settings"])
        run.lengthen(max_steps)
        return _train_env(env, run.config, {}, resume=run.path)
    source = agent_file or run.record.get("source")
    if source is None:
        raise PalestraError(
            f"{run.path} was started from Python. Continue it there with train_grpo(…, resume={str(run.path)!r}), "
            f"or give the agent's file: palestra train my_agent.py --resume {name}"
        )
    file = load_agent_file(source)
    run.lengthen(max_steps)
    config = run.config
    return _on_file(file, replace(file.agent, model=config.model.name), config, resume=run.path)


def _train(prepared: PreparedRun, console: Console) -> GRPOTrainingResult:
    from palestra.faces.cli.common import load_libraries

    load_libraries(console, prepared.config.model.name)
    from palestra.faces.cli.common import show_path, sigterm_as_ctrl_c
    from palestra.faces.cli.display import make_display

    display = make_display(console, prepared.config.track.log_every)
    try:
        with sigterm_as_ctrl_c(), display:
            return prepared.train(display)
    except KeyboardInterrupt:
        if display.run_dir is None:
            raise
        click.secho("\nStopped; every finished step is saved. Continue with:", fg="yellow", err=True)
        click.echo(f"  palestra train --resume {show_path(display.run_dir)}", err=True)
        raise click.exceptions.Exit(130) from None


def _present(result: GRPOTrainingResult, console: Console, as_json: bool) -> None:
    from palestra.faces.cli.summary import print_training

    page = result.outcome.report_path
    print_training(console, result, page)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "held_out_before": result.before.pass_rate.rate,
                    "held_out_after": result.after.pass_rate.rate,
                    "seconds": round(result.outcome.seconds, 2),
                    "run_dir": str(result.run.path),
                    "model_path": str(result.model_path),
                    "report": str(page),
                }
            )
        )


settings.options(command)
