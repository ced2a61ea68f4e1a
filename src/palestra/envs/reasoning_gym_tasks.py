"""The datasets of reasoning-gym by name, out of its source: importing it takes seconds."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

FAMILY = "reasoning_gym"
_NAME = re.compile(r'^DATASET_NAME\s*=\s*["\']([\w-]+)["\']', re.MULTILINE)
_REGISTERED = re.compile(r'^register_dataset\(\s*(?:["\']([\w-]+)["\']|DATASET_NAME)', re.MULTILINE)
_NOT_A_TASK = {"composite"}  # a mixture of others, that has to be put together first

# tasks whose scorer gives wrong answers the full score, as of reasoning-gym 0.1.25: training on them teaches nothing
WRONG_SCORERS = {
    "coin_flip": "the answer 0 scores 1.0 whenever the right one begins with 0",
    "game_of_life_halting": "every answer scores 1.0",
}


@cache
def task_names() -> tuple[str, ...]:
    """The names of all datasets of the installed reasoning-gym; none when it is not installed."""
    spec = find_spec(FAMILY)
    names: set[str] = set()
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in Path(folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8", errors="replace")
            declared = _NAME.search(text)
            names |= {literal or (declared[1] if declared else "") for literal in _REGISTERED.findall(text)}
    return tuple(sorted(names - _NOT_A_TASK - {""}))
