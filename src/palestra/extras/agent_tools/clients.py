"""`RlTools` calls the tools for one client; `Clients` holds the clients of a server."""

from __future__ import annotations

import inspect
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from palestra.agents.tools.run import ArgumentError, read_arguments
from palestra.core.calls import OutOfThreads, call_user_code
from palestra.core.errors import did_you_mean
from palestra.envs.discover import discover
from palestra.extras.agent_tools.answers import Answer, Refusal, answer, closest, require_json, short
from palestra.extras.agent_tools.config_fields import Progress, describe
from palestra.extras.agent_tools.locks import Site, load_site
from palestra.extras.agent_tools.pending_run import PendingRunConfig
from palestra.extras.agent_tools.tools import TOOLS, Call, Data
from palestra.runs.index import UnknownRun
from palestra.runs.manager import Run, RunManager, State

MAX_SESSIONS = 1000
_MAX_LOOKS = 1000
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


class RlTools:
    """One client's session: the environment it selected, its edited settings, and its last look at each run.

    Each tool is a method, too. Two sessions share the runs of the machine and nothing else.
    """

    def __init__(
        self, manager: RunManager | None = None, site: Site | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.manager = manager or RunManager()
        self.site = site or load_site()
        self.testing = threading.Lock()  # one rl_test_inference at a time
        self._clock = clock
        self._pending: PendingRunConfig | None = None
        self._looks: OrderedDict[str, tuple[State, float]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def pending(self) -> PendingRunConfig:
        """The training that is being prepared; Refusal if no environment is selected."""
        if self._pending is None:
            raise Refusal(
                "no environment is selected; call rl_select_environment first, rl_list_environments has names"
            )
        return self._pending

    def select(self, name: str, progress: Progress) -> PendingRunConfig:
        """Start with the own settings of an environment; earlier edits are dropped."""
        discovery = discover()
        names = [env.name for env in discovery.environments]
        if name not in names:
            raise Refusal(
                f"there is no environment {short(name)!r}.{did_you_mean(name[:200], names)}",
                available=closest(name, names),
            )
        env = discovery.named(name)
        pending = PendingRunConfig.of(env, describe(env, None, self.site.limits, progress), self.site)
        with self._lock:
            self._pending = pending
        return pending

    def edit(self, field: str, value: Any) -> PendingRunConfig:
        with self._lock:
            self._pending = pending = self.pending.edit(field, value)
        return pending

    def run(self, run_id: str) -> Run:
        """Find a run by its id. Invalid ids never reach files or SQL."""
        text = f"there is no run {short(run_id)!r}; rl_list_runs names them"
        if run_id.isalnum() and run_id.isascii() and len(run_id) <= 64:
            try:
                return self.manager.get(run_id)
            except UnknownRun as error:
                text = str(error)
        raise Refusal(text, active_runs=[run.run_id for run in self.manager.list() if run.is_active])

    def seconds_to_wait(self, run: Run) -> float:
        """Seconds until this run may be looked at again; 0 counts as a look. A new state may be seen immediately."""
        now, pause_s = self._clock(), self.site.limits.status_check_minutes * 60
        with self._lock:
            state, when = self._looks.get(run.run_id, (None, 0.0))
            wait_s = when + pause_s - now
            if state == run.state and wait_s > 0 and run.is_active:
                return wait_s
            remember(self._looks, run.run_id, (run.state, now), _MAX_LOOKS)
        return 0.0

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


def remember(recent: OrderedDict[str, Any], key: str, value: Any, most: int) -> None:
    """Make an entry the newest one, and drop the oldest one if there are more than `most`."""
    recent[key] = value
    recent.move_to_end(key)
    if len(recent) > most:
        recent.popitem(last=False)


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
