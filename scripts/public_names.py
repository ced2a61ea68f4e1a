"""Print the public names of this installation, one a line: Python names, settings, commands.

python scripts/public_names.py > names.txt
python scripts/public_names.py --since names.txt     # lines of names.txt that are missing here
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

import click

MODULES = ("palestra", "palestra.trl", "palestra.agent_tools")


def public_names() -> list[str]:
    from palestra.cli.main import cli
    from palestra.core.config import RunConfig

    names = [f"python {module}.{name}" for module in MODULES for name in import_module(module).__all__]
    return [*names, *(f"setting {key}" for key in RunConfig.settings()), *commands(cli, "palestra")]


def commands(group: click.Group, path: str) -> list[str]:
    """The commands of a group and of the groups in it."""
    context, names = click.Context(group), list[str]()
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        names.append(f"command {path} {name}")
        if isinstance(command, click.Group):
            names += commands(command, f"{path} {name}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", type=Path, metavar="FILE", help="print only names of this file that are missing")
    since = parser.parse_args().since
    here = public_names()
    print("\n".join(sorted(set(since.read_text().splitlines()) - set(here)) if since else sorted(set(here))))


if __name__ == "__main__":
    main()
