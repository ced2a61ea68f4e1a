"""The tracker that is always on: metrics.jsonl, rollouts.jsonl and tokens/ in the run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from palestra.core.files import append_jsonl, filter_jsonl, replacing
from palestra.core.group_codec import rollout_to_dict
from palestra.core.run_folder import RunFolder
from palestra.core.types import Array, Group


class JsonlTracker:
    """One line per step in metrics.jsonl, one line per rollout of every `rollouts_every`-th step in rollouts.jsonl."""

    def __init__(self, folder: RunFolder, resume_after: int | None = None, rollouts_every: int = 1) -> None:
        self._folder = folder
        self._rollouts_every = rollouts_every
        if resume_after is not None:  # the steps after it are repeated
            for path in (folder.metrics_file, folder.rollouts_file):
                filter_jsonl(path, lambda row: isinstance(step := row.get("step"), int) and step <= resume_after)
            for step, path in folder.tokens_files().items():
                if step > resume_after:
                    path.unlink()

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        append_jsonl(self._folder.metrics_file, [{"step": step, **row}])

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        if not self._rollouts_every or step % self._rollouts_every:
            return
        rows = (
            {"step": step, "group": g, **rollout_to_dict(r)} for g, group in enumerate(groups) for r in group.rollouts
        )
        append_jsonl(self._folder.rollouts_file, rows)

    def tokens(self, step: int, table: Array) -> None:
        import numpy as np

        path = self._folder.tokens_file(step)
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as partial, partial.open("wb") as file:
            np.save(file, table, allow_pickle=False)

    def close(self) -> None:
        pass
