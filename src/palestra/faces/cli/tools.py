"""`palestra tools`: the schemas of the rl_* tools."""

from __future__ import annotations

import json

import click


@click.group("tools")
def command() -> None:
    """The rl_* tools, with which an agent trains models."""


@command.command("schema")
@click.option("--json/--list", "as_json", default=True, help="The schemas (default), or a line for each tool.")
def schema(as_json: bool) -> None:
    """Print the schemas of the tools, in OpenAI's function-calling format."""
    from palestra.faces.rl_tools import tool_schemas

    schemas = tool_schemas()
    if as_json:
        click.echo(json.dumps(schemas, indent=1))
        return
    for function in (row["function"] for row in schemas):
        click.echo(f"{function['name']}({', '.join(function['parameters']['properties'])})")
        click.echo(f"    {function['description'].splitlines()[0]}")
