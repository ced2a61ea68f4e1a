"""What one client has selected, edited and looked at. Two sessions share the runs of the machine and nothing else."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from palestra.agent_tools.answers import Refusal, short
from palestra.agent_tools.draft import Draft, describe
from palestra.core.errors import did_you_mean
from palestra.envs.discover import discover
from palestra.runs.index import UnknownRun
from palestra.runs.locks import Site, load_site
from palestra.runs.manager import Run, RunManager, State

_MAX_LOOKS = 1000


class Session:
    """The selected environment with its edited settings, and when each run was last looked at."""

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
        self._draft: Draft | None = None
        self._looks: OrderedDict[str, tuple[State, float]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def draft(self) -> Draft:
        """The training that is being prepared; Refusal if no environment is selected."""
        if self._draft is None:
            raise Refusal(
                "no environment is selected; call rl_select_environment first, rl_list_environments has names"
            )
        return self._draft

    def select(self, name: str) -> Draft:
        """A new draft for an environment, without earlier edits."""
        found = discover()
        names = [env.name for env in found.environments]
        if name not in names:
            raise Refusal(f"there is no environment {short(name)!r}.{did_you_mean(name[:200], names)}", available=names)
        env = found.named(name)
        draft = Draft.of(env, describe(env), self.site)
        with self._lock:
            self._draft = draft
        return draft

    def edit(self, field: str, value: Any) -> Draft:
        """The draft with one setting changed."""
        with self._lock:
            self._draft = draft = self.draft.edit(field, value)
        return draft

    def run(self, run_id: str) -> Run:
        """A run by its id. What cannot be an id never reaches files or SQL."""
        text = f"there is no run {short(run_id)!r}; rl_list_runs names them"
        if run_id.isalnum() and run_id.isascii() and len(run_id) <= 64:
            try:
                return self.manager.get(run_id)
            except UnknownRun as error:
                text = str(error)
        raise Refusal(text, active_runs=self.manager.active_ids())

    def seconds_to_wait(self, run: Run) -> float:
        """How long until this run may be looked at again; 0 counts as a look. A new state may be looked at at once."""
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
