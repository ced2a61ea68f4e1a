"""The datasets of reasoning-gym by name, and their scores, without importing it: that takes seconds."""

from __future__ import annotations

import atexit
import re
import threading
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from palestra.core.errors import UserCodeError
from palestra.envs.child_process import ChildFailed, ChildProcess

FAMILY = "reasoning_gym"
_NAME = re.compile(r'^DATASET_NAME\s*=\s*["\']([\w-]+)["\']', re.MULTILINE)
_REGISTERED = re.compile(r'^register_dataset\(\s*(?:["\']([\w-]+)["\']|DATASET_NAME)', re.MULTILINE)
_ANSWER_S = 5.0
_START_S = 120.0  # importing the library takes seconds, more on a busy machine
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


class ScorerProcess:
    """Scores answers by `dataset.score_answer` in one child process, which stays warm and is restarted if it fails."""

    def __init__(self, timeout_s: float = _ANSWER_S) -> None:
        self._timeout_s = timeout_s
        self._child = ChildProcess()
        self._lock = threading.Lock()

    def score(self, task: str, settings: Mapping[str, Any], answer: str, entry: Any) -> float:
        """The library's score; ChildFailed with the reason where it gives none."""
        with self._lock:  # a request that restarted the process would wait for its import
            if not self._child.is_running:
                self._start()
            request = {"task": task, "settings": dict(settings), "answer": answer, "entry": entry}
            return float(self._child.ask("score", self._timeout_s, **request))

    def _start(self) -> None:
        """Import the library; `chain_sum` with any answer is scored whatever the library's version."""
        first = {"task": "chain_sum", "settings": {"seed": 0, "size": 1}, "answer": "", "entry": {"answer": "0"}}
        try:
            self._child.ask("score", _START_S, **first)
        except ChildFailed as error:
            raise UserCodeError(f"the process that scores answers cannot run reasoning-gym: {error}") from None

    def close(self) -> None:
        self._child.close()


scorer = ScorerProcess()
atexit.register(scorer.close)
