"""`palestra config`: the settings that a run would use."""

from __future__ import annotations

import json
import shutil
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from palestra.agent_source import open_agent_file
from palestra.cli import settings
from palestra.cli.common import config_option, debug_option, json_option, print_sections
from palestra.core.config import RunConfig


@settings.command_of_run("config")
@click.argument("agent_file", required=False)
@config_option
@click.option("--keys", is_flag=True, help="List every setting with its default and description.")
@json_option
@debug_option
def command(agent_file: str | None, config_file: Path | None, keys: bool, as_json: bool, **parameters: Any) -> None:
    """Print the settings that `palestra train` would use, as YAML that `--config` reads back.

    \b
    palestra config my_agent.py > run.yaml      write them down, then edit
    palestra config my_agent.py --lora.r 8      with those of your file and of the command line
    palestra config --keys                      every setting with its default and description
    """
    if keys:
        _print_keys(as_json)
        return
    import yaml

    _, _, config = open_agent_file(agent_file, settings.layer(config_file, settings.from_options(parameters)))
    data = config.model_dump(mode="json")
    click.echo(json.dumps(data) + "\n" if as_json else yaml.safe_dump(data, sort_keys=False), nl=False)


def _print_keys(as_json: bool) -> None:
    all_settings = RunConfig.settings().items()
    if as_json:
        listing = {
            key: {"default": info.get_default(call_default_factory=True), "about": info.description or ""}
            for key, info in all_settings
        }
        click.echo(json.dumps(listing))
        return
    sections = (
        (section or "run", [settings.describe(key, info) for key, info in members])
        for section, members in groupby(all_settings, lambda setting: setting[0].rpartition(".")[0])
    )
    print_sections(sections, width=min(shutil.get_terminal_size().columns, 120), column=46)
