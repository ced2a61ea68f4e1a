"""The tracker that is always on: metrics.jsonl, rollouts.jsonl and tokens/ in the run folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from palestra.core.files import append_jsonl, filter_jsonl, replacing
from palestra.core.group_codec import rollout_to_dict
from palestra.core.run_folder import RunFolder
from palestra.core.types import Array, Group
from palestra.runs.tracking.base import Tracker


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
        self._written.append(self._thread.submit(self._write_rollouts, step, groups))

    def _write_rollouts(self, step: int, groups: Sequence[Group]) -> None:
        rows = (
            {"step": step, "group": g, **rollout_to_dict(r)} for g, group in enumerate(groups) for r in group.rollouts
        )
        append_jsonl(self._folder.rollouts_file, rows)

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
