"""The tracker that is always on: metrics.jsonl and rollouts.jsonl in the run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from palestra.core.files import append_jsonl, filter_jsonl
from palestra.core.group_codec import rollout_to_dict
from palestra.core.run_folder import RunFolder
from palestra.core.types import Group


class JsonlTracker:
    """One line per step in metrics.jsonl, one line per rollout of every `rollouts_every`-th step in rollouts.jsonl."""

    def __init__(self, folder: RunFolder, resume_after: int | None = None, rollouts_every: int = 1) -> None:
        self._folder = folder
        self._rollouts_every = rollouts_every
        if resume_after is not None:  # the steps after it are repeated
            for path in (folder.metrics_file, folder.rollouts_file):
                filter_jsonl(path, lambda row: isinstance(step := row.get("step"), int) and step <= resume_after)

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        append_jsonl(self._folder.metrics_file, [{"step": step, **row}])

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        if not self._rollouts_every or step % self._rollouts_every:
            return
        rows = ({"step": step, **rollout_to_dict(r)} for group in groups for r in group.rollouts)
        append_jsonl(self._folder.rollouts_file, rows)

    def close(self) -> None:
        pass
