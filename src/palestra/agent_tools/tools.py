"""The ten tools by which an agent drives trainings: one table, from which Python, MCP and HTTP are made."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Literal

from palestra.agent_tools import views
from palestra.agent_tools.answers import Answer, Refusal, answer, require_json, short
from palestra.agent_tools.draft import describe
from palestra.agent_tools.inference import InferenceTest
from palestra.agent_tools.models import choose_models
from palestra.agent_tools.requirements import HINTS, check_rl_python_version, get_missing_keys
from palestra.agent_tools.session import Session
from palestra.agents.tools.run import ArgumentError, read_arguments
from palestra.agents.tools.tool import Tool, function_tool
from palestra.core.errors import PalestraError, did_you_mean
from palestra.envs.discover import discover

JsonValue = str | int | float | bool | list[Any] | dict[str, Any] | None
Progress = Callable[[float, float, str], None]  # done, total, what is being done
Effect = Literal["reads", "edits", "starts", "stops"]
_STOP_WAIT_S = 60.0
_MAX_LISTED = 200


@dataclass(frozen=True)
class Call:
    """One call of a tool: whose it is, where its progress is reported, and whether it was cancelled."""

    session: Session
    progress: Progress
    cancelled: threading.Event


def rl_list_environments(call: Call) -> views.Data:
    """List the environments that a model can be trained on. Start here."""
    return views.environments(discover())


def rl_select_environment(call: Call, name: str) -> views.Data:
    """Select the environment to train on, and load its settings with its own values. Earlier edits are dropped.

    Args:
        name: A name from rl_list_environments.
    """
    return views.selected(call.session.select(name))


def rl_get_current_config(call: Call) -> views.Data:
    """Show the settings of the selected environment and of its training: which may be edited, which are locked."""
    return views.config(call.session.draft)


def rl_edit_config(call: Call, field: str, value: JsonValue) -> views.Data:
    """Change one setting of the training.

    Args:
        field: A name from configurable_fields of rl_get_current_config.
        value: The new value, of the field's type.
    """
    return views.edited(call.session.edit(field, value), field)


def rl_start_training(call: Call) -> views.Data:
    """Start a training on the selected environment with the current settings. It goes on when you disconnect."""
    session, draft = call.session, call.session.draft
    if not check_rl_python_version():
        raise PalestraError("Palestra needs Python 3.11 or newer; start this server with one")
    trackers = {*draft.value("track.report_to"), *(["wandb"] if draft.env_settings().get("use_wandb") else [])}
    missing = get_missing_keys(draft.site.profile, trackers)
    if missing:
        hints = "; ".join(f"{key}: {HINTS[key]}" for key in missing)
        raise Refusal(f"{' and '.join(missing)} must be set in this server's environment ({hints})", missing=missing)
    describe(draft.found, draft.env_settings())  # they must fit together, too
    limit = session.site.limits.active_runs
    return views.started(session.manager.start(draft.request(), max_active=limit), draft)


def rl_check_status(call: Call, run_id: str) -> views.Data:
    """Look how a training is doing. Trainings take long: look seldom; a look too soon tells only the state.

    Args:
        run_id: The id that rl_start_training gave, or one from rl_list_runs.
    """
    run = call.session.run(run_id)
    wait_s = call.session.seconds_to_wait(run)
    return views.too_soon(run, wait_s) if wait_s else views.status(run)


def rl_stop_training(call: Call, run_id: str) -> views.Data:
    """Stop a training. What it has learned so far is saved in a checkpoint.

    Args:
        run_id: The id that rl_start_training gave, or one from rl_list_runs.
    """
    run = call.session.run(run_id)
    return views.stopped(call.session.manager.stop(run.run_id, wait_s=_STOP_WAIT_S) if run.is_active else run)


def rl_get_results(call: Call, run_id: str) -> views.Data:
    """Get the metrics of a training, their history, and the path of the trained weights.

    Args:
        run_id: The id that rl_start_training gave, or one from rl_list_runs.
    """
    run = call.session.run(run_id)
    return views.results(run, call.session.manager.results(run.run_id))


def rl_list_runs(call: Call, limit: int = 50, offset: int = 0) -> views.Data:
    """List all trainings with their states, newest first, also those of earlier sessions and other clients.

    Args:
        limit: Trainings to list at once, at most 200.
        offset: How many of the newest to leave out: next_offset of the answer before.
    """
    if not (1 <= limit <= _MAX_LISTED and offset >= 0):
        raise Refusal(f"limit={short(limit)}, offset={short(offset)}; expected 1 to {_MAX_LISTED}, and 0 or more")
    found, total = call.session.manager.page(limit, offset)
    return views.runs(found, offset, total)


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
    session, draft = call.session, call.session.draft
    chosen = choose_models(models, session.site, str(draft.value("model.name")))
    test = InferenceTest(draft, num_steps, group_size, session.manager.home, call.progress, call.cancelled)
    if not session.testing.acquire(blocking=False):
        raise Refusal("a test is running already; wait for its answer, then ask for another")
    try:
        return test.run(chosen)
    finally:
        session.testing.release()


@dataclass(frozen=True)
class RlTool(Tool):
    """A tool whose function takes the Call first, which the schema does not show."""

    effect: Effect = "reads"


def _tool(function: Callable[..., views.Data], effect: Effect) -> RlTool:
    shown = function_tool(MethodType(function, object()))  # bound, so that the signature lacks the Call
    return RlTool(shown.name, shown.description, shown.parameters, function, shown.readers, effect=effect)


TOOLS: Mapping[str, RlTool] = {
    tool.name: tool
    for tool in (
        _tool(rl_list_environments, "reads"),
        _tool(rl_select_environment, "edits"),
        _tool(rl_get_current_config, "reads"),
        _tool(rl_edit_config, "edits"),
        _tool(rl_start_training, "starts"),
        _tool(rl_check_status, "reads"),
        _tool(rl_stop_training, "stops"),
        _tool(rl_get_results, "reads"),
        _tool(rl_list_runs, "reads"),
        _tool(rl_test_inference, "starts"),
    )
}


class RlTools(Session):
    """A session with its tools: `call` by name, as a model does, or as methods. Every answer is a JSON object."""

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
            tool = _find(name)
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
        return partial(self._call_as_python, TOOLS[name])

    def _call_as_python(self, tool: RlTool, /, *args: Any, **kwargs: Any) -> Answer:
        bound = inspect.signature(tool.fn).bind(None, *args, **kwargs)
        return self.call(tool.name, {name: value for name, value in bound.arguments.items() if name != "call"})


def _find(name: Any) -> RlTool:
    if not isinstance(name, str):
        raise Refusal(f"a tool is called by its name, got a {type(name).__name__}", available=list(TOOLS))
    if name not in TOOLS:
        raise Refusal(f"there is no tool {short(name)!r}.{did_you_mean(short(name), TOOLS)}", available=list(TOOLS))
    return TOOLS[name]
