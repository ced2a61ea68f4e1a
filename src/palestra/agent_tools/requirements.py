"""What a backend needs before a training can start: a Python, and keys by their names. The local one needs no key."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping

MINIMUM_PYTHON = (3, 11)
BACKEND_KEYS = {"local": (), "tinker": ("TINKER_API_KEY",)}
TRACKER_KEYS = {"wandb": ("WANDB_API_KEY",)}
HINTS = {
    "TINKER_API_KEY": "make one in the Tinker console",
    "WANDB_API_KEY": "make one at wandb.ai/authorize, or leave wandb out of track.report_to",
}


def check_rl_python_version() -> bool:
    """Whether this Python is new enough."""
    return sys.version_info[:2] >= MINIMUM_PYTHON


def check_rl_api_keys(backend: str = "local", trackers: Iterable[str] = ()) -> bool:
    """Whether every key that the backend and the trackers need is set."""
    return not get_missing_keys(backend, trackers)


def get_missing_keys(
    backend: str = "local", trackers: Iterable[str] = (), environ: Mapping[str, str] = os.environ
) -> list[str]:
    """The names of the keys that are needed and not set."""
    needed = [*BACKEND_KEYS[backend], *(key for tracker in trackers for key in TRACKER_KEYS.get(tracker, ()))]
    return [key for key in needed if not environ.get(key)]
