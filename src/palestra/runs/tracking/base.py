"""Trackers: where the metrics and rollouts of a run are written. `JsonlTracker` is always on."""

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
        """What the step found for each token of its rollouts, as `train.update` says; it may be made later."""

    def flush(self) -> None:
        """Wait until all of it is on disk."""

    def close(self) -> None: ...


class Trackers(Tracker):
    """Several trackers as one."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.metrics(step, row)

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        for tracker in self._trackers:
            tracker.rollouts(step, groups)

    def tokens(self, step: int, table: Callable[[], Array]) -> None:
        for tracker in self._trackers:
            tracker.tokens(step, table)

    def flush(self) -> None:
        for tracker in self._trackers:
            tracker.flush()

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


class JsonlTracker(Tracker):
    """One line per step in metrics.jsonl, one line per rollout of every `rollouts_every`-th step in rollouts.jsonl.

    Rollouts and tokens are written in a thread: a step has hundreds, and the next one begins to sample meanwhile. What
    fails there is raised by `flush`, which the next step calls.
    """

    def __init__(self, folder: RunFolder, resume_after: int | None = None, rollouts_every: int = 1) -> None:
        self._folder = folder
        self._rollouts_every = rollouts_every
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

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        self.flush()
        if not self._rollouts_every or step % self._rollouts_every:
            return
        rows = (
            {"step": step, "group": g, **rollout_to_dict(r)} for g, group in enumerate(groups) for r in group.rollouts
        )
        self._written.append(self._thread.submit(append_jsonl, self._folder.rollouts_file, rows))

    def tokens(self, step: int, table: Callable[[], Array]) -> None:
        self._written.append(self._thread.submit(self._write_tokens, step, table))

    def _write_tokens(self, step: int, table: Callable[[], Array]) -> None:
        import numpy as np

        path = self._folder.tokens_file(step)
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as partial, partial.open("wb") as file:
            np.save(file, table(), allow_pickle=False)

    def flush(self) -> None:
        written, self._written = self._written, []
        for part in written:
            part.result()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._thread.shutdown()


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
