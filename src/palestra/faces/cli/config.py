"""`palestra config`: the settings that a run would use."""

from __future__ import annotations

import json
import shutil
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from palestra.core.config import RunConfig
from palestra.faces.cli import settings


@click.command("config", context_settings={"max_content_width": 100})
@click.argument("agent_file", required=False)
@click.option("--config", "config_file", type=click.Path(path_type=Path), metavar="FILE", help="Settings from YAML.")
@click.option("--keys", is_flag=True, help="List every setting with its default and description.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@settings.debug_option
def command(agent_file: str | None, config_file: Path | None, keys: bool, as_json: bool, **parameters: Any) -> None:
    """Print the settings that `palestra train` would use, as YAML that `--config` reads back.

    \b
    palestra config > run.yaml                  write them down, then edit
    palestra config my_agent.py --lora.r 8      with those of your file and of the command line
    palestra config --keys                      every setting with its default and description
    """
    if keys:
        _print_keys(as_json)
        return
    import yaml

    from palestra.core.yaml_config import read_yaml_config
    from palestra.faces.cli.agent_file import configure, load_agent_file

    layer = read_yaml_config(config_file) if config_file else {}
    _, config = configure(load_agent_file(agent_file), layer, settings.from_options(parameters))
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
    rows = [settings.describe(key, info) for key, info in all_settings]
    formatter = click.HelpFormatter(width=min(shutil.get_terminal_size().columns, 120))
    for section, members in groupby(rows, lambda row: row[0].rpartition(".")[0]):
        with formatter.section(section or "run"):
            formatter.write_dl([(f"{key} = {default}", text) for key, default, text in members], col_max=46)
    click.echo(formatter.getvalue().rstrip())


settings.options(command)
