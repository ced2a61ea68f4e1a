"""`palestra config`: the settings that a run would use."""

from __future__ import annotations

import shutil
from itertools import groupby
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from palestra.agent_source import open_agent_file
from palestra.cli import settings
from palestra.cli.common import print_sections, returns_data
from palestra.core.config import RunConfig
from palestra.core.extras import provided


@settings.command_of_run("config", returns_data)
@click.argument("agent_file", required=False)
@click.option("--keys", is_flag=True, help="List every setting with its default and description.")
@click.option("--locked", is_flag=True, help="List the settings that an LLM agent may not change here, and its limits.")
def command(
    agent_file: str | None,
    config_file: Path | None,
    keys: bool,
    locked: bool,
    console: Console,
    **parameters: Any,
) -> dict[str, Any]:
    """Print the settings that `palestra train` would use, as YAML that `--config` reads back.

    \b
    palestra config my_agent.py > run.yaml      write them down, then edit
    palestra config my_agent.py --lora.r 8      with those of your file and of the command line
    palestra config --keys                      every setting with its default and description
    palestra config --locked                    those that agents may not change, by ./palestra.yaml or PALESTRA_SITE
    """
    if locked:
        data, sections = provided("config --locked")()
        print_sections(console, sections)
        return data
    if keys:
        every = RunConfig.settings().items()
        sections = (
            (section or "run", [settings.describe(key, info) for key, info in members])
            for section, members in groupby(every, lambda setting: setting[0].rpartition(".")[0])
        )
        print_sections(console, sections, width=min(shutil.get_terminal_size().columns, 120), column=46)
        return {
            key: {"default": info.get_default(call_default_factory=True), "about": info.description or ""}
            for key, info in every
        }
    import yaml

    _, _, config = open_agent_file(agent_file, settings.layer(config_file, settings.from_options(parameters)))
    data = config.model_dump(mode="json")
    console.out(yaml.safe_dump(data, sort_keys=False), end="", highlight=False)
    return data
