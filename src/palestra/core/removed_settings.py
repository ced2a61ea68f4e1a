"""Settings that earlier versions had: `REMOVED_SETTINGS` says what to use instead of each."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from palestra.core import extras
from palestra.core.errors import SettingError, did_you_mean

log = logging.getLogger("palestra")


class RemovedSetting(NamedTuple):
    """A setting that no longer exists. `instead` completes "train.x was removed: …"."""

    default: Any
    instead: str
    last_version: str = "0.2.0"


# By dotted key. A stored run that has the default still loads; any other value names the last version that had it.
REMOVED_SETTINGS: dict[str, RemovedSetting] = {
    "agent.fork_server": RemovedSetting(False, "each attempt starts its program; leave it out"),
    "env.isolation": RemovedSetting("auto", "the sandbox always uses namespaces of the Linux kernel; leave it out"),
    "env.container_image": RemovedSetting(
        "docker.io/library/python:3.11-slim", "the sandbox uses namespaces instead of containers; leave it out"
    ),
    "train.replay": RemovedSetting(0.0, "learn from successes in an rft stage before grpo: stages.plan = rft,grpo"),
}


def unknown_setting(key: str, known: Iterable[str]) -> str:
    """The error message for a key that is not a setting: what replaced it, or the closest known key."""
    if removed := REMOVED_SETTINGS.get(key):
        return f"{key} was removed: {removed.instead}"
    section = key.partition(".")[0]
    if section in extras.SETTINGS and not extras.has_settings(section):
        return extras.missing(extras.SETTINGS[section].partition(".")[0], key)
    return f"unknown setting {key!r}.{did_you_mean(key, known)}"


def without_removed(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The settings of a stored run, by dotted key, without removed ones that had their default."""
    removed = {key: value for key, value in settings.items() if key in REMOVED_SETTINGS}
    for key, value in removed.items():
        default, instead, version = REMOVED_SETTINGS[key]
        if value != default:
            raise SettingError(
                f"{where} has {key} = {value!r}; the last version that had it is {version}. In this version, {instead}"
            )
    if removed:
        _warn_once(where, ", ".join(removed))
    elsewhere = [name for name in extras.SETTINGS if not extras.has_settings(name)]  # sections of missing extras
    return {k: v for k, v in settings.items() if k not in removed and k.partition(".")[0] not in elsewhere}


@lru_cache(maxsize=1024)
def _warn_once(where: str, keys: str) -> None:
    """Warn the first time: the dashboard reads a run's settings with every request."""
    log.warning("%s: ignoring removed settings at their defaults: %s", where, keys)
