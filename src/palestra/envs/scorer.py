"""Scorers of others run in a process that can be ended: one for all environments, warm, started anew when it fails."""

from __future__ import annotations

import atexit
import io
import json
import pickle
import selectors
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palestra.core import children
from palestra.core.errors import PalestraError

_CHILD = Path(__file__).with_name("scoring_child.py")
_ANSWER_S = 5.0
_START_S = 120.0  # importing the library takes seconds, more on a busy machine


class ScoringFailed(Exception):
    """An answer whose score could not be computed: the scorer raised, took too long or ended."""


class ScorerProcess:
    """Scores by `dataset.score_answer` of reasoning-gym in a child without our keys, with limits of time and memory."""

    def __init__(self, timeout_s: float = _ANSWER_S) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._number = 0

    def score(self, task: str, settings: Mapping[str, Any], answer: str, entry: Any) -> float:
        """The library's score; ScoringFailed with the reason where it gives none."""
        with self._lock:
            self._number += 1
            if self._process is None:
                self._start()
            reply = self._ask((self._number, task, dict(settings), answer, entry), self._timeout_s)
        if "error" in reply:
            raise ScoringFailed(reply["error"])
        return float(reply["value"])

    def _start(self) -> None:
        command = children.isolated(_CHILD)
        self._process = children.start(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
        # the first answer waits for the import; "0" is a number, so this scores whatever the library is
        reply = self._ask((self._number, "chain_sum", {"seed": 0, "size": 1}, "", {"answer": "0"}), _START_S)
        if "value" not in reply:
            raise PalestraError(f"the process that scores answers cannot run reasoning-gym: {reply['error']}")

    def _ask(self, request: tuple[Any, ...], timeout_s: float) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert isinstance(process.stdin, io.TextIOWrapper)
        assert process.stdout is not None
        try:
            process.stdin.buffer.write(pickle.dumps(request))
            process.stdin.buffer.flush()
            with selectors.DefaultSelector() as ready:
                ready.register(process.stdout, selectors.EVENT_READ)
                is_late = not ready.select(timeout_s)
            reply = {} if is_late else json.loads(process.stdout.readline() or "null")
            if reply and reply["number"] == request[0]:
                return dict(reply)
            reason = f"scoring took longer than {timeout_s:g} s" if is_late else "the scorer ended while scoring"
        except (OSError, ValueError, TypeError, KeyError) as error:
            reason = f"the scorer ended while scoring ({type(error).__name__})"
        self.close()
        return {"error": reason}

    def close(self) -> None:
        if self._process is not None:
            children.end(self._process)
            self._process = None


scorer = ScorerProcess()
atexit.register(scorer.close)
