"""The ten tools by which an agent drives trainings. A session belongs to one client: two do not disturb each other."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from palestra.core.errors import PalestraError, did_you_mean
from palestra.envs.discover import discover
from palestra.faces.rl_tools import views
from palestra.faces.rl_tools.answers import Answer, Refusal, answer, require_json, short
from palestra.faces.rl_tools.draft import Draft
from palestra.faces.rl_tools.other_dialects import describe
from palestra.faces.rl_tools.requirements import HINTS, check_rl_python_version, get_missing_keys
from palestra.runs.locks import Site, load_site
from palestra.runs.manager import RunManager, State
from palestra.tools.arguments import ArgumentError, read_arguments
from palestra.tools.tool import Tool, function_tool

JsonValue = str | int | float | bool | list[Any] | dict[str, Any] | None
Progress = Callable[[float, float, str], None]  # done, total, what is being done
_MAX_LOOKS = 1000
_STOP_WAIT_S = 60.0


class RlTools:
    """What one client has selected and edited, and the tools over it. Every tool answers a JSON object."""

    def __init__(
        self,
        manager: RunManager | None = None,
        site: Site | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.manager = manager or RunManager()
        self.site = site or load_site()
        self._clock = clock
        self._draft: Draft | None = None
        self._looks: OrderedDict[str, tuple[State, float]] = OrderedDict()
        self._lock = threading.Lock()
        self._testing = threading.Lock()

    def call(
        self,
        name: str,
        arguments: Any = None,
        *,
        progress: Progress = lambda done, total, text: None,
        cancelled: threading.Event | None = None,
    ) -> Answer:
        """Call a tool as a model does, by name and JSON arguments. Never raises."""

        def make() -> Mapping[str, Any]:
            if not isinstance(name, str):
                raise Refusal(f"a tool is called by its name, got a {type(name).__name__}", available=list(TOOL_NAMES))
            tool = all_tools().get(name)
            if tool is None:
                near = did_you_mean(short(name), TOOL_NAMES)
                raise Refusal(f"there is no tool {short(name)!r}.{near}", available=list(TOOL_NAMES))
            try:
                given = read_arguments(tool, require_json({} if arguments is None else arguments))
            except ArgumentError as error:
                raise Refusal(short(error, 1000)) from None
            return self._work(tool.name, given, progress, cancelled or threading.Event())

        return answer(make)

    def _work(
        self, name: str, given: dict[str, Any], progress: Progress, cancelled: threading.Event
    ) -> Mapping[str, Any]:
        match name:
            case "rl_list_environments":
                return views.environments(discover())
            case "rl_select_environment":
                return self._select(**given)
            case "rl_get_current_config":
                return views.config(self._selected())
            case "rl_edit_config":
                return self._edit(**given)
            case "rl_start_training":
                return self._start()
            case "rl_check_status":
                return self._status(**given)
            case "rl_stop_training":
                return views.stopped(self.manager.stop(self._known(**given), wait_s=_STOP_WAIT_S))
            case "rl_get_results":
                run = self.manager.get(self._known(**given))
                return views.results(run, self.manager.results(run.run_id))
            case "rl_list_runs":
                return views.runs(self.manager.list())
            case _:
                return self._test_inference(**given, progress=progress, cancelled=cancelled)

    def rl_list_environments(self) -> Answer:
        """List the environments that a model can be trained on. Start here."""
        return self.call("rl_list_environments")

    def rl_select_environment(self, name: str) -> Answer:
        """Select the environment to train on, and load its settings with its own values. Earlier edits are dropped.

        Args:
            name: A name from rl_list_environments.
        """
        return self.call("rl_select_environment", {"name": name})

    def rl_get_current_config(self) -> Answer:
        """Show the settings of the selected environment and of its training: which may be edited, which are locked."""
        return self.call("rl_get_current_config")

    def rl_edit_config(self, field: str, value: JsonValue) -> Answer:
        """Change one setting of the training.

        Args:
            field: A name from configurable_fields of rl_get_current_config.
            value: The new value, of the field's type.
        """
        return self.call("rl_edit_config", {"field": field, "value": value})

    def rl_start_training(self) -> Answer:
        """Start a training on the selected environment with the current settings. It goes on when you disconnect."""
        return self.call("rl_start_training")

    def rl_check_status(self, run_id: str) -> Answer:
        """Look how a training is doing. Trainings take long: look seldom; a look too soon tells only the state.

        Args:
            run_id: The id that rl_start_training gave, or one from rl_list_runs.
        """
        return self.call("rl_check_status", {"run_id": run_id})

    def rl_stop_training(self, run_id: str) -> Answer:
        """Stop a training. What it has learned so far is saved in a checkpoint.

        Args:
            run_id: The id that rl_start_training gave, or one from rl_list_runs.
        """
        return self.call("rl_stop_training", {"run_id": run_id})

    def rl_get_results(self, run_id: str) -> Answer:
        """Get the metrics of a training, their history, and the path of the trained weights.

        Args:
            run_id: The id that rl_start_training gave, or one from rl_list_runs.
        """
        return self.call("rl_get_results", {"run_id": run_id})

    def rl_list_runs(self) -> Answer:
        """List all trainings with their states, also those of earlier sessions and other clients."""
        return self.call("rl_list_runs")

    def rl_test_inference(self, num_steps: int = 3, group_size: int = 16, models: list[str] | None = None) -> Answer:
        """Let models attempt problems of the selected environment, without training, to see whether it can be learned.

        Args:
            num_steps: Problems that each model attempts.
            group_size: Attempts at each problem.
            models: Names at the endpoint, local ones (palestra/tiny, a folder, local:HUB_ID), or NAME@URL for a server
                on this machine. Default: a few small models where OPENROUTER_API_KEY is set, else the model to train.
        """
        given = {"num_steps": num_steps, "group_size": group_size, "models": models}
        return self.call("rl_test_inference", given)

    def _selected(self) -> Draft:
        if self._draft is None:
            raise Refusal(
                "no environment is selected; call rl_select_environment first, rl_list_environments has names"
            )
        return self._draft

    def _select(self, name: str) -> Mapping[str, Any]:
        found = discover()
        names = [env.name for env in found.environments]
        if name not in names:
            raise Refusal(f"there is no environment {short(name)!r}.{did_you_mean(name[:200], names)}", available=names)
        env = found.named(name)
        draft = Draft.of(env, describe(env), self.site)
        with self._lock:
            self._draft = draft
        return views.selected(draft)

    def _edit(self, field: str, value: Any) -> Mapping[str, Any]:
        with self._lock:
            self._draft = draft = self._selected().edit(field, value)
        return views.edited(draft, field)

    def _start(self) -> Mapping[str, Any]:
        draft = self._selected()
        if not check_rl_python_version():
            raise PalestraError("Palestra needs Python 3.11 or newer; start this server with one")
        missing = get_missing_keys(draft.site.profile, draft.value("track.report_to"))
        if missing:
            hints = "; ".join(f"{key}: {HINTS[key]}" for key in missing)
            raise Refusal(
                f"{' and '.join(missing)} must be set in this server's environment ({hints})", missing=missing
            )
        describe(draft.found, draft.env_settings())  # they must fit together, too
        most = self.site.limits.active_runs
        if sum(run.is_active for run in self.manager.list()) >= most:
            raise Refusal(f"{most} runs are going on or waiting already; stop one, or wait until one has ended")
        return views.started(self.manager.start(draft.request()), draft)

    def _known(self, run_id: str) -> str:
        """The id itself, where it can be one; whatever else it is never reaches files or SQL."""
        if not (run_id.isalnum() and run_id.isascii() and len(run_id) <= 64):
            known = [run.run_id for run in self.manager.list()[:20]]
            raise Refusal(f"there is no run {short(run_id)!r}; rl_list_runs names them", available=known)
        return run_id

    def _status(self, run_id: str) -> Mapping[str, Any]:
        run = self.manager.get(self._known(run_id))  # an unknown run is an error, and counts as no look
        now, pause_s = self._clock(), self.site.limits.status_check_minutes * 60
        with self._lock:
            state, when = self._looks.get(run_id, (None, 0.0))
            wait_s = when + pause_s - now
            if state == run.state and wait_s > 0 and run.is_active:
                return views.too_soon(run, wait_s)
            self._looks[run_id] = (run.state, now)
            self._looks.move_to_end(run_id)
            while len(self._looks) > _MAX_LOOKS:
                self._looks.popitem(last=False)
        return views.status(run)

    def _test_inference(
        self,
        progress: Progress,
        cancelled: threading.Event,
        num_steps: int = 3,
        group_size: int = 16,
        models: list[str] | None = None,
    ) -> Mapping[str, Any]:
        from palestra.faces.rl_tools.inference import InferenceTest, choose_models

        draft = self._selected()
        chosen = choose_models(models, self.site, str(draft.value("model.name")))
        test = InferenceTest(draft, num_steps, group_size, self.manager.home, progress, cancelled)
        if not self._testing.acquire(blocking=False):
            raise Refusal("a test is running already; wait for its answer, then ask for another")
        try:
            return test.run(chosen)
        finally:
            self._testing.release()


TOOL_NAMES = (
    "rl_list_environments",
    "rl_select_environment",
    "rl_get_current_config",
    "rl_edit_config",
    "rl_start_training",
    "rl_check_status",
    "rl_stop_training",
    "rl_get_results",
    "rl_list_runs",
    "rl_test_inference",
)


@cache
def all_tools() -> dict[str, Tool]:
    """The tools with their schemas, bound to no session."""
    nobody = object.__new__(RlTools)
    return {name: function_tool(getattr(nobody, name)) for name in TOOL_NAMES}
