"""`palestra train --detach`: a training in the background, under a supervisor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from palestra.faces.cli.env_settings import EnvSettings


def detach(
    agent_file: str | None,
    env: str | None,
    config_file: Path | None,
    options: dict[str, Any],
    wire: bool | None,
    console: Console,
    as_json: bool,
) -> None:
    """Check the settings, start the run, and print the commands to follow it."""
    from palestra.faces.cli.common import show_path
    from palestra.runs.manager import RunManager, RunRequest

    checked = _checked(agent_file, env, config_file, options)
    request = RunRequest(
        environment=_absolute(env),
        agent_file=_absolute(agent_file),
        settings={"output_dir": str(Path("runs").absolute()), **checked.run},
        env_settings=checked.env,
        server_settings=checked.openai,
        wire=wire,
        name=Path(env or agent_file or "demo").stem,
    )
    run = RunManager().start(request)
    if as_json:
        click.echo(json.dumps(run.to_dict()))
        return
    console.print(f"run {run.run_id} started; this terminal may be closed", highlight=False)
    for action in ("watch", "logs", "stop"):
        console.print(f"  palestra runs {action} {run.run_id}", highlight=False)
    console.print(f"run folder {show_path(run.folder)}", style="dim", highlight=False)


def _checked(agent_file: str | None, env: str | None, config_file: Path | None, options: dict[str, Any]) -> EnvSettings:
    """The settings, tried on the environment or the agent file, so that a mistake is reported before the start."""
    from palestra.faces.cli.env_settings import EnvSettings, read_settings

    if env is None:
        from palestra.core.yaml_config import read_yaml_config
        from palestra.faces.cli.agent_file import configure, load_agent_file

        layer = read_yaml_config(config_file) if config_file else {}
        configure(load_agent_file(agent_file), layer, options)
        return EnvSettings(run={**layer, **options})
    from palestra.envs.load import find_env
    from palestra.faces.cli.env import open_env

    if find_env(env).dialect != "palestra":
        return read_settings(config_file, options)
    return open_env(env, config_file, options)[2]


def _absolute(name: str | None) -> str | None:
    """A file (or FILE:CLASS) with its absolute path; other names unchanged."""
    if name is None:
        return None
    file, colon, cls = name.partition(":")
    return f"{Path(file).resolve()}{colon}{cls}" if file.endswith(".py") else name
