"""Ask for consent before running code that a foreign run folder names.

A run folder is your own if the index of runs in PALESTRA_HOME lists this very folder: `palestra train` and the Python
API list every run that they start. Any other folder is foreign: a copy, a download, a colleague's run.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from palestra.core.errors import NotAllowedError
from palestra.core.run_folder import RunFolder
from palestra.core.show import visible

Function = TypeVar("Function", bound=Callable[..., Any])
_DEMOS = (None, "demo", "palestra.demo")  # agents that come with Palestra


def trust_option(function: Function) -> Function:
    """Add --trust to a command."""
    text = "Run code that a run folder from elsewhere names, without asking."
    return click.option("--trust", is_flag=True, help=text)(function)


def require_trust(folder: RunFolder, code: Sequence[str], trust: bool) -> None:
    """Ask on a terminal, unless the folder is the user's own, or names no code; PalestraError without consent."""
    if trust or not code or is_own(folder):
        return
    listing = "".join(f"\n  {visible(line)}" for line in code)
    reason = f"{folder.path} is not one of your runs, and this would use, with your rights:{listing}"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise NotAllowedError(f"{reason}\nread it first; if you trust it, repeat the command with --trust")
    if not click.confirm(f"{reason}\nDo you trust it?", default=False, err=True):
        raise NotAllowedError("nothing was run, because the folder is not trusted")


def is_own(folder: RunFolder) -> bool:
    """Whether the index of runs lists exactly this folder."""
    from palestra.runs.reader import RunReader

    try:
        return RunReader().listed_row(RunFolder(folder.path.absolute())) is not None
    except (sqlite3.Error, OSError):
        return False


def code_for_tools(record: Mapping[str, Any]) -> list[str]:
    """Code that gives a run its tools and problems: an environment or an agent file; none if it comes with Palestra."""
    environment = record.get("environment")
    if isinstance(environment, Mapping):
        settings = environment.get("settings") or {}
        name = str(environment.get("name"))
        if _is_built_in(name) and isinstance(settings, Mapping) and "allow_unsandboxed" not in settings:
            return []
        return [f"the environment {name} with the settings {dict(settings) if settings else 'of its file'}"]
    source = record.get("source")
    is_here = source not in _DEMOS and Path(str(source)).exists()  # the file of another machine cannot run
    return [f"the agent file {source}"] if is_here else []


def code_of_run(record: Mapping[str, Any]) -> list[str]:
    """All that a resumed run may execute or contact. Its settings name addresses, trackers and folders too."""
    found = code_for_tools(record)
    for name in ("agent_options", "scored_by", "atropos"):
        if values := record.get(name):
            found.append(f"{name}: {values}")
    return [*found, "its config.yaml, which names addresses, folders and functions, and its checkpoints"]


def _is_built_in(name: str) -> bool:
    """Whether a name means an environment of Palestra's library, whatever files there are."""
    from palestra.envs.discover import FAMILY, LIBRARY, in_file, python_files

    names = {env.name for path in python_files(LIBRARY) for env in in_file(path)}
    return name in names or name.startswith(f"{FAMILY}/")
