"""Trackers: where the metrics and rollouts of a run are written. `JsonlTracker` writes the files of its folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from palestra.core.files import append_jsonl, filter_jsonl, replacing
from palestra.core.group_codec import rollout_to_dict
from palestra.core.run_folder import RunFolder
from palestra.core.types import Array, Group

log = logging.getLogger("palestra")

# Each call to a service that is down may take minutes to time out.
MAX_CONSECUTIVE_FAILURES = 3


class Tracker:
    """Takes metrics and rollouts, once a step, from the training loop. Subclasses override what they store."""

    def metrics(self, step: int, row: Mapping[str, float]) -> None: ...

    def rollouts(self, step: int, groups: Sequence[Group]) -> None: ...

    def tokens(self, step: int, table: Callable[[], Array]) -> None:
        """The columns that `train.update` computed for each token of the step; `table` may be called later."""

    def flush(self) -> None:
        """Wait until all of it is on disk."""

    def close(self) -> None: ...


class JsonlTracker(Tracker):
    """One line per step in metrics.jsonl, one line per rollout of every `rollouts_every`-th step in rollouts.jsonl.

    Rollouts and tokens are written in a thread: a step has hundreds, and the next one begins to sample meanwhile. What
    fails there is raised by `flush`, which the next step calls. `services` get the same metrics and rollouts.
    """

    def __init__(
        self,
        folder: RunFolder,
        resume_after: int | None = None,
        rollouts_every: int = 1,
        services: Sequence[Tracker] = (),
    ) -> None:
        self._folder = folder
        self._rollouts_every = rollouts_every
        self._services = services
        self._thread = ThreadPoolExecutor(1, "palestra-records")
        self._written: list[Future[None]] = []
        if resume_after is not None:  # the steps after it are repeated
            for path in (folder.metrics_file, folder.rollouts_file):
                filter_jsonl(path, lambda row: isinstance(step := row.get("step"), int) and step <= resume_after)
            for step, path in folder.tokens_files().items():
                if step > resume_after:
                    path.unlink()

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        append_jsonl(self._folder.metrics_file, [{"step": step, **row}])
        for service in self._services:
            service.metrics(step, row)

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        self.flush()
        if self._rollouts_every and step % self._rollouts_every == 0:
            rows = (
                {"step": step, "group": g, **rollout_to_dict(rollout)}
                for g, group in enumerate(groups)
                for rollout in group.rollouts
            )
            self._written.append(self._thread.submit(append_jsonl, self._folder.rollouts_file, rows))
        for service in self._services:
            service.rollouts(step, groups)

    def tokens(self, step: int, table: Callable[[], Array]) -> None:
        def write() -> None:
            import numpy as np

            path = self._folder.tokens_file(step)
            path.parent.mkdir(exist_ok=True)
            with replacing(path) as partial, partial.open("wb") as file:
                np.save(file, table(), allow_pickle=False)

        self._written.append(self._thread.submit(write))

    def flush(self) -> None:
        written, self._written = self._written, []
        for part in written:
            part.result()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._thread.shutdown()
            for service in self._services:
                service.close()


class GuardedTracker(Tracker):
    """A service whose failure does not stop the run: the first is logged; after three in a row it is not called."""

    def __init__(self, name: str, service: Tracker) -> None:
        self._name = name
        self._service = service
        self._warned = False
        self._failures = 0

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        if self._failures < MAX_CONSECUTIVE_FAILURES:
            self._try(lambda: self._service.metrics(step, row))

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        if self._failures < MAX_CONSECUTIVE_FAILURES:
            self._try(lambda: self._service.rollouts(step, groups))

    def close(self) -> None:
        self._try(self._service.close)

    def _try(self, call: Callable[[], None]) -> None:
        try:
            call()
            self._failures = 0
        except Exception as error:
            self._failures += 1
            if not self._warned:
                self._warned = True
                text = "%s failed (%s: %s); the run goes on, and metrics.jsonl has every number"
                log.warning(text, self._name, type(error).__name__, error)
