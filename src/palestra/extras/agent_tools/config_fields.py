"""An environment's config fields, with its own values: read in a process that has none of our secrets."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.core.errors import UserCodeError
from palestra.core.secrets import clean_environment
from palestra.envs.child_process import ChildFailed, ChildProcess, ChildTimeout
from palestra.envs.discover import DiscoveredEnv, package_of


@dataclass(frozen=True)
class EnvDescription:
    """The config of an environment: one row per field, and the settings of a training that suit it."""

    fields: list[dict[str, Any]]  # name, type, default (the environment's own), description, schema
    run_settings: dict[str, Any]


def describe_env(
    entry: DiscoveredEnv,
    settings: Mapping[str, Any] | None = None,
    *,
    timeout_s: float = 180.0,
    python: Path | None = None,
) -> EnvDescription:
    """Ask the environment for its config, with `settings` laid over it; what does not fit raises PalestraError.

    `python` is an interpreter with the packages that the environment imports; by default ours.
    """
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryFile() as stderr:
        child = ChildProcess(python or sys.executable, clean_environment() | {"HOME": home}, home, stderr)
        package, roots = package_of(entry.file_path)
        try:
            answer = child.ask(
                "describe",
                timeout_s,
                file=str(entry.file_path),
                class_name=entry.class_name,
                settings={**entry.preset, **(settings or {})},
                package=package,
                roots=[str(root) for root in roots],
            )
            return EnvDescription(list(answer["fields"]), dict(answer["run_settings"]))
        except ChildTimeout as error:
            raise UserCodeError(
                f"the config of {entry.name} cannot be read: {error}. If this machine is busy, try again or raise "
                "limits.config_minutes in the site file; otherwise import and config_init should load no data or model"
            ) from None
        except (ChildFailed, TypeError, KeyError, ValueError) as error:
            raise UserCodeError(f"the config of {entry.name} cannot be read: {error}") from None
        finally:
            child.close()
