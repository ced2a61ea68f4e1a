"""The ten tools by which an agent drives trainings: one table, from which Python, MCP and HTTP are made.

`RlTools` is one client's session, `Clients` holds the sessions of a server.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal

from palestra.agents.tools.run import ArgumentError, read_arguments
from palestra.agents.tools.tool import Tool, function_tool
from palestra.core.calls import OutOfThreads, call_with_limit
from palestra.core.errors import MissingPackageError, did_you_mean
from palestra.envs.discover import discover
from palestra.extras.agent_tools import views
from palestra.extras.agent_tools.answers import Answer, Refusal, answer, closest, require_json, require_page, short
from palestra.extras.agent_tools.endpoints import choose_models
from palestra.extras.agent_tools.inference import InferenceTest
from palestra.extras.agent_tools.locks import Site, load_site
from palestra.extras.agent_tools.pending_run import TRACKING_NAME, PendingRunConfig, Progress, describe
from palestra.runs.index import UnknownRun
from palestra.runs.manager import Run, RunManager, State
from palestra.runs.tracking import needs_wandb_key

JsonValue = str | int | float | bool | list[Any] | dict[str, Any] | None
Effect = Literal["reads", "edits", "starts", "stops"]
MAX_SESSIONS = 1000
MINIMUM_PYTHON = (3, 11)
_BACKEND_KEYS = {"local": (), "tinker": ("TINKER_API_KEY",)}
_HINTS = {
    "TINKER_API_KEY": "make one in the Tinker console",
    "WANDB_API_KEY": "make one at wandb.ai/authorize, set WANDB_MODE=offline, or leave wandb out of track.report_to",
}
_STOP_WAIT_S = 60.0
_MAX_LOOKS = 1000
_LONGEST_CALL_S = 24 * 3600.0


@dataclass(frozen=True)
class Call:
    """One call of a tool: its session, where its progress is reported, and whether it was cancelled."""

    tools: RlTools
    progress: Progress
    cancelled: threading.Event


def rl_list_environments(call: Call, contains: str = "", limit: int = 30, offset: int = 0) -> views.Data:
    """List the environments that a model can be trained on, those in your own files first. Start here.

    Args:
        contains: Only names and descriptions with this text.
        limit: Environments to list at once, at most 200.
        offset: How many to leave out: next_offset of the answer before.
    """
    return views.environments(discover(), contains, limit, offset)


def rl_select_environment(call: Call, name: str) -> views.Data:
    """Select the environment to train on, and load its settings with its own values. Earlier edits are dropped.

    The first environment written for Atropos takes minutes: what it needs is installed. If you give up waiting, the
    installation continues; select it again later.

    Args:
        name: A name from rl_list_environments.
    """
    pending = call.tools.select(name, call.progress)
    return {
        "message": f"{pending.env.name} is selected. rl_get_current_config shows its settings, "
        "rl_start_training starts a training",
        "environment": pending.env.name,
        "file_path": pending.env.file_path,
        TRACKING_NAME: pending.edited[TRACKING_NAME],
    }


def rl_get_current_config(call: Call, contains: str = "", limit: int = 30, offset: int = 0) -> views.Data:
    """Show the settings of the selected environment and of its training: which may be edited, which are locked. The
    environment's own and the usual ones come first.

    Args:
        contains: Only names with this text, such as "train." or "lora".
        limit: Settings to list at once, at most 200.
        offset: How many to leave out: next_offset of the answer before.
    """
    return views.config(call.tools.pending, contains, limit, offset)


def rl_edit_config(call: Call, field: str, value: JsonValue) -> views.Data:
    """Change one setting of the training.

    Args:
        field: A name from configurable_fields of rl_get_current_config.
        value: The new value, of the field's type.
    """
    pending = call.tools.edit(field, value)
    name = pending.own_name(field)
    message = f"{name} is changed" + (f" ({field} is another name of it)" if name != field else "")
    return {"message": message, "field": name, "value": pending.value(name), "config": pending.config()}


def rl_start_training(call: Call) -> views.Data:
    """Start a training on the selected environment with the current settings. It goes on when you disconnect."""
    tools, pending = call.tools, call.tools.pending
    if not check_rl_python_version():
        raise MissingPackageError("Palestra needs Python 3.11 or newer; start this server with one")
    trackers = {*pending.value("track.report_to"), *(["wandb"] if pending.env_settings().get("use_wandb") else [])}
    missing = get_missing_keys(pending.site.profile, trackers)
    if missing:
        hints = "; ".join(f"{key}: {_HINTS[key]}" for key in missing)
        raise Refusal(f"{' and '.join(missing)} must be set in this server's environment ({hints})", missing=missing)
    describe(pending.env, pending.env_settings(), tools.site.limits)  # they must fit together, too
    limit = tools.site.limits.active_runs
    return views.started(tools.manager.start(pending.request(), max_active=limit), pending)


def rl_check_status(call: Call, run_id: str) -> views.Data:
    """Look how a training is doing. Trainings take long: look seldom; a look too soon tells only the state.

    Args:
        run_id: The id that rl_start_training gave, or one from rl_list_runs.
    """
    run = call.tools.run(run_id)
    if not (wait_s := call.tools.seconds_to_wait(run)):
        return views.status(run)
    return {
        **views.header(run),
        "rate_limited": True,
        "message": f"its state is the same as at your last look; look again in {wait_s / 60:.0f} minutes. "
        "A change of state is told at once",
        "minutes_to_wait": round(wait_s / 60, 1),
        "next_check_in_seconds": math.ceil(wait_s),
    }


def rl_stop_training(call: Call, run_id: str) -> views.Data:
    """Stop a training. What it has learned so far is saved in a checkpoint.

    Args:
        run_id: The id that rl_start_training gave, or one from rl_list_runs.
    """
    run = call.tools.run(run_id)
    if run.is_active:
        run = call.tools.manager.stop(run.run_id, wait_s=_STOP_WAIT_S)
    message = f"the run is {run.state}" + (f": {run.reason}" if run.reason else "")
    return {**views.header(run), "message": message, "folder": run.folder, "processes": dict(run.processes)}


def rl_get_results(call: Call, run_id: str) -> views.Data:
    """Get the metrics of a training, their history, and the path of the trained weights.

    Args:
        run_id: The id that rl_start_training gave, or one from rl_list_runs.
    """
    run = call.tools.run(run_id)
    return views.results(run, call.tools.manager.results(run.run_id))


def rl_list_runs(call: Call, limit: int = 50, offset: int = 0) -> views.Data:
    """List all trainings with their states, newest first, also those of earlier sessions and other clients.

    Args:
        limit: Trainings to list at once, at most 200.
        offset: How many of the newest to leave out: next_offset of the answer before.
    """
    require_page(limit, offset)
    runs, total = call.tools.manager.page(limit, offset)
    return views.runs(runs, offset, total)


def rl_test_inference(
    call: Call, num_steps: int = 3, group_size: int = 16, models: list[str] | None = None
) -> views.Data:
    """Let models attempt problems of the selected environment, without training, to see whether it can be learned.

    Args:
        num_steps: Problems that each model attempts.
        group_size: Attempts at each problem.
        models: Names at the endpoint, local ones (palestra/tiny, a folder, local:HUB_ID), or NAME@URL for a server
            on this machine. Default: a few small models where OPENROUTER_API_KEY is set, else the model to train.
    """
    tools, pending = call.tools, call.tools.pending
    chosen = choose_models(models, tools.site, str(pending.value("model.name")))
    test = InferenceTest(pending, num_steps, group_size, tools.manager.home, call.progress, call.cancelled)
    if not tools.testing.acquire(blocking=False):
        raise Refusal("a test is running already; wait for its answer, then ask for another")
    try:
        return test.run(chosen)
    finally:
        tools.testing.release()


@dataclass(frozen=True)
class RlTool(Tool):
    """A tool whose function takes the Call first, which the schema does not show."""

    effect: Effect = "reads"


_EFFECTS: Mapping[Callable[..., views.Data], Effect] = {
    rl_list_environments: "reads",
    rl_select_environment: "edits",
    rl_get_current_config: "reads",
    rl_edit_config: "edits",
    rl_start_training: "starts",
    rl_check_status: "reads",
    rl_stop_training: "stops",
    rl_get_results: "reads",
    rl_list_runs: "reads",
    rl_test_inference: "starts",
}
TOOLS: Mapping[str, RlTool] = {
    shown.name: RlTool(shown.name, shown.description, shown.parameters, function, shown.readers, effect=effect)
    for function, effect in _EFFECTS.items()
    for shown in [function_tool(MethodType(function, object()))]  # bound, so that the signature lacks the Call
}


class RlTools:
    """One client's session: the environment it selected, its edited settings, and its last look at each run.

    `call` takes a tool by name, as a model does; the tools are methods, too. Every answer is a JSON object.
    Two sessions share the runs of the machine and nothing else.
    """

    def __init__(
        self,
        manager: RunManager | None = None,
        site: Site | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.manager = manager or RunManager()
        self.site = site or load_site()
        self.testing = threading.Lock()  # one rl_test_inference at a time
        self._clock = clock
        self._pending: PendingRunConfig | None = None
        self._looks: OrderedDict[str, tuple[State, float]] = OrderedDict()
        self._lock = threading.Lock()

    def call(
        self,
        name: str,
        arguments: Any = None,
        *,
        progress: Progress = lambda done, total, text: None,
        cancelled: threading.Event | None = None,
    ) -> Answer:
        """Call a tool by its name and JSON arguments. Never raises."""

        def make() -> views.Data:
            if name not in list(TOOLS):  # a client may send anything for a name
                near = did_you_mean(short(name), TOOLS)
                raise Refusal(f"there is no tool {short(name)!r}.{near}", available=list(TOOLS))
            tool = TOOLS[name]
            try:
                checked = read_arguments(tool, require_json({} if arguments is None else arguments))
            except ArgumentError as error:
                raise Refusal(short(error, 1000)) from None
            return tool(Call(self, progress, cancelled or threading.Event()), **checked)

        return answer(make)

    def __getattr__(self, name: str) -> Callable[..., Answer]:
        """`tools.rl_check_status(run_id)` calls the tool of this name."""
        if name not in TOOLS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

        def call(*args: Any, **kwargs: Any) -> Answer:
            arguments = inspect.signature(TOOLS[name].fn).bind(None, *args, **kwargs).arguments
            return self.call(name, {key: value for key, value in arguments.items() if key != "call"})

        return call

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
            self._looks[run.run_id] = (run.state, now)
            self._looks.move_to_end(run.run_id)
            while len(self._looks) > _MAX_LOOKS:
                self._looks.popitem(last=False)
        return 0.0


def check_rl_python_version() -> bool:
    """Whether this Python is new enough."""
    return sys.version_info[:2] >= MINIMUM_PYTHON


def check_rl_api_keys(backend: str = "local", trackers: Iterable[str] = ()) -> bool:
    """Whether every key that the backend and the trackers need is set."""
    return not get_missing_keys(backend, trackers)


def get_missing_keys(
    backend: str = "local", trackers: Iterable[str] = (), environ: Mapping[str, str] = os.environ
) -> list[str]:
    """The names of the keys that are needed and not set; W&B needs none offline, or after `wandb login`."""
    missing = [key for key in _BACKEND_KEYS[backend] if not environ.get(key)]
    return missing + (["WANDB_API_KEY"] if "wandb" in trackers and needs_wandb_key(environ) else [])


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
