"""The settings of several runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from palestra.core.config import flatten, load_yaml
from palestra.core.run_folder import RunFolder

_IGNORED = ("output_dir", "track.run_name")  # they differ in every run


def settings_of(folder: RunFolder) -> dict[str, Any]:
    """The settings that a run has in its config.yaml, by dotted key."""
    flat = flatten(load_yaml(folder.config_file)) if folder.config_file.is_file() else {}
    return {key: value for key, value in flat.items() if key not in _IGNORED}


def differing_keys(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that are not the same in all runs."""
    keys = dict.fromkeys(key for one in settings for key in one)
    return [key for key in keys if len({repr(one.get(key)) for one in settings}) > 1]
