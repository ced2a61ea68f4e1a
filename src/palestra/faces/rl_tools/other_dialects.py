"""Environments that are written for another library run in a Python that has it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from palestra.core.errors import PalestraError
from palestra.envs.config_fields import EnvDescription, describe_env
from palestra.envs.discover import DiscoveredEnv
from palestra.faces.cli.train_wire import WIRE_DEFAULTS


def describe(found: DiscoveredEnv, settings: Mapping[str, Any] | None = None) -> EnvDescription:
    """The environment's config with `settings` laid over it, and the settings of a training that suit it."""
    told = describe_env(found, settings, python=python_of(found))
    if found.dialect == "palestra":
        return told
    return replace(told, run_settings={**WIRE_DEFAULTS, **told.run_settings})


def python_of(found: DiscoveredEnv) -> Path | None:
    """The Python that can import an environment; None is ours."""
    if found.dialect != "atropos":
        return None
    from palestra.core.files import cache_folder

    name = f"atropos-0.4.0-py{sys.version_info.major}.{sys.version_info.minor}"
    python = cache_folder() / name / "bin" / "python"
    if not python.is_file():
        raise PalestraError(
            f"{found.name} is written for atroposlib, which is not installed yet; install it once with: "
            f"palestra env run-atropos {found.file_path} --train.max_steps 1"
        )
    return python
