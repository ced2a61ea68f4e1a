"""The state of one client: the environment it selected, its edited settings, and its last look at each run."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from palestra.core.errors import did_you_mean
from palestra.envs.discover import discover
from palestra.extras.agent_tools.answers import Refusal, closest, short
from palestra.extras.agent_tools.config_fields import Progress, describe
from palestra.extras.agent_tools.locks import Site, load_site
from palestra.extras.agent_tools.pending_run import PendingRunConfig
from palestra.runs.index import UnknownRun
from palestra.runs.manager import Run, RunManager, State

_MAX_LOOKS = 1000


class Session:
    """What the tools work on. Two sessions share the runs of the machine and nothing else."""

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


def remember(recent: OrderedDict[str, Any], key: str, value: Any, most: int) -> None:
    """Make an entry the newest one, and drop the oldest one if there are more than `most`."""
    recent[key] = value
    recent.move_to_end(key)
    if len(recent) > most:
        recent.popitem(last=False)
