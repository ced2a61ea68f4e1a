"""What was made for a key before, up to a limit: what a model makes up must not fill the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

MAX_REMEMBERED = 1024
Value = TypeVar("Value")


def remembered(known: dict[Any, Value], key: Any, make: Callable[[], Value]) -> Value:
    """What `make` gave for this key before, or gives now."""
    if key not in known:
        if len(known) >= MAX_REMEMBERED:
            known.clear()
        known[key] = make()
    return known[key]
