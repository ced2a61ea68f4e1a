"""Many clients at once: a session for each, and calls that block no event loop."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from palestra.agent_tools.answers import Answer
from palestra.agent_tools.tools import Progress, RlTools
from palestra.core.calls import OutOfThreads, call_with_limit

MAX_SESSIONS = 1000
_LONGEST_CALL_S = 24 * 3600.0


class Clients:
    """The sessions by client. When there are too many, the least recently used one is dropped; its runs stay."""

    def __init__(self, make: Callable[[], RlTools], max_sessions: int = MAX_SESSIONS) -> None:
        self._make = make
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[str, RlTools] = OrderedDict()
        self._lock = threading.Lock()

    def session(self, client: str) -> RlTools:
        with self._lock:
            if client not in self._sessions:
                self._sessions[client] = self._make()
                if len(self._sessions) > self._max_sessions:
                    self._sessions.popitem(last=False)
            self._sessions.move_to_end(client)
            return self._sessions[client]


async def call_in_thread(
    tools: RlTools, name: str, arguments: Any, progress: Progress = lambda done, total, text: None
) -> Answer:
    """Call a tool from an event loop; cancelling the coroutine stops the work, too."""
    cancelled = threading.Event()
    try:
        answer: Answer = await call_with_limit(
            tools.call, name, arguments, progress=progress, cancelled=cancelled, timeout_s=_LONGEST_CALL_S
        )
        return answer
    except OutOfThreads as error:
        return {"error": str(error)}
    finally:
        cancelled.set()


def is_refusal(answer: Answer) -> bool:
    """Whether the tool refused; the error of a run that failed comes with its status, and is no refusal."""
    return "error" in answer and "status" not in answer
