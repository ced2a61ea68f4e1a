"""An environment's config fields, with its own values: read in a process that has none of our secrets."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.core import children
from palestra.core.errors import PalestraError
from palestra.core.secrets import clean_environment
from palestra.envs.discover import DiscoveredEnv


@dataclass(frozen=True)
class EnvDescription:
    """What an environment says of its config: a row a field, and the settings of a training that suit it."""

    fields: list[dict[str, Any]]  # name, type, default (the environment's own), description, schema
    run_settings: dict[str, Any]


def describe_env(
    found: DiscoveredEnv,
    settings: Mapping[str, Any] | None = None,
    *,
    timeout_s: float = 30.0,
    python: Path | None = None,
) -> EnvDescription:
    """Ask the environment for its config, with `settings` laid over it; what does not fit raises PalestraError.

    `python` is the interpreter that has what the environment imports; ours unless given.
    """
    asked = {
        "file": str(found.file_path),
        "class_name": found.class_name,
        "settings": {**found.preset, **(settings or {})},
    }
    answer, complaints = _ask(found.name, python or Path(sys.executable), asked, timeout_s)
    try:
        description = json.loads(answer)
    except ValueError:
        lines = complaints.strip().splitlines()
        description = {"error": lines[-1] if lines else "its process ended without an answer"}
    if "error" in description:
        raise PalestraError(f"the config of {found.name} cannot be read: {description['error']}")
    return EnvDescription(description["fields"], description["run_settings"])


def _ask(name: str, python: Path, asked: dict[str, Any], timeout_s: float) -> tuple[str, str]:
    with tempfile.TemporaryDirectory() as home:
        command = children.isolated(Path(__file__).with_name("config_child.py"), python=python)
        process = children.start(command, env=clean_environment() | {"HOME": home}, cwd=home, stdin=subprocess.PIPE)
        try:
            return process.communicate(json.dumps(asked), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise PalestraError(f"reading the config of {name} took longer than {timeout_s:g} s") from None
        finally:
            children.end(process)
