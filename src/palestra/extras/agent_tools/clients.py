"""`RlTools` calls the tools for one client; `Clients` holds the clients of a server."""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from palestra.agents.tools.run import ArgumentError, read_arguments
from palestra.core.calls import OutOfThreads, call_user_code
from palestra.core.errors import did_you_mean
from palestra.extras.agent_tools.answers import Answer, Refusal, answer, require_json, short
from palestra.extras.agent_tools.config_fields import Progress
from palestra.extras.agent_tools.session import Session, remember
from palestra.extras.agent_tools.tools import TOOLS, Call, Data

MAX_SESSIONS = 1000
_LONGEST_CALL_S = 24 * 3600.0


def tool_function(name: str, session: Callable[[], RlTools]) -> Callable[..., Answer]:
    """The tool of this name as a function of its arguments, over the session that is current at each call."""
    if name not in TOOLS:
        raise AttributeError(f"there is no attribute or rl_* tool {name!r}")
    signature = inspect.signature(TOOLS[name].fn)  # its first parameter is the Call
    signature = signature.replace(parameters=list(signature.parameters.values())[1:])

    @wraps(TOOLS[name].fn)
    def call(*args: Any, **kwargs: Any) -> Answer:
        return session().call(name, signature.bind(*args, **kwargs).arguments)

    vars(call)["__signature__"] = signature
    return call


class RlTools(Session):
    """One client's session with its tools, each of which is a method, too. Every answer is a JSON object."""

    def call(
        self,
        name: str,
        arguments: Any = None,
        *,
        progress: Progress = lambda done, total, text: None,
        cancelled: threading.Event | None = None,
    ) -> Answer:
        """Call a tool by its name and JSON arguments. Never raises."""

        def make() -> Data:
            if name not in list(TOOLS):  # a client may send anything for a name
                near = did_you_mean(short(name), TOOLS)
                raise Refusal(f"there is no tool {short(name)!r}.{near}", available=list(TOOLS))
            try:
                checked = read_arguments(TOOLS[name], require_json({} if arguments is None else arguments))
            except ArgumentError as error:
                raise Refusal(short(error, 1000)) from None
            made: Data = TOOLS[name](Call(self, progress, cancelled or threading.Event()), **checked)
            return made

        return answer(make)

    def __getattr__(self, name: str) -> Callable[..., Answer]:
        """`tools.rl_check_status(run_id)` calls the tool of this name."""
        return tool_function(name, lambda: self)


class Clients:
    """The sessions by client. When there are too many, the least recently used one is dropped; its runs stay."""

    def __init__(self, make: Callable[[], RlTools], max_sessions: int = MAX_SESSIONS) -> None:
        self._make = make
        self._max_sessions = max_sessions
        self._sessions: OrderedDict[str, RlTools] = OrderedDict()
        self._lock = threading.Lock()

    def session(self, client: str) -> RlTools:
        with self._lock:
            session = self._sessions.get(client) or self._make()
            remember(self._sessions, client, session, self._max_sessions)
            return session


async def call_in_thread(
    tools: RlTools, name: str, arguments: Any, progress: Progress = lambda done, total, text: None
) -> Answer:
    """Call a tool from an event loop; cancelling the coroutine stops the work, too."""
    cancelled = threading.Event()
    try:
        call = partial(tools.call, name, arguments, progress=progress, cancelled=cancelled)
        answer: Answer = await call_user_code(name, call, limit_s=_LONGEST_CALL_S)
        return answer
    except OutOfThreads as error:
        return {"error": str(error)}
    finally:
        cancelled.set()
