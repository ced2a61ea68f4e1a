"""A file of an evaluation's attempts, from which one that was interrupted is resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from palestra.core.errors import NotFoundError, SettingError, StateError, UnreadableFileError
from palestra.core.files import append_jsonl, read_jsonl, write_jsonl
from palestra.core.group_codec import rollout_from_dict, rollout_to_dict
from palestra.core.types import Group, Problem, Rollout

_ABOUT = "evaluation"  # the key of the first line


class EvalFile:
    """JSON lines: what is scored and how, then one line for each attempt, written as soon as its group has ended.

    `about` are the settings that an attempt depends on. A file of other settings is refused: its attempts cannot be
    counted together with new ones.
    """

    def __init__(self, path: Path, about: Mapping[str, Any], *, resume: bool) -> None:
        self._path = path
        self._about = dict(about)
        if path.exists() and not resume:
            raise StateError(f"{path} exists; add --resume to continue its evaluation, or choose another file")
        if not resume:
            return
        if not path.is_file():
            raise NotFoundError(f"there is no file {path} to resume from; leave out --resume to start")
        first = next(read_jsonl(path), {}).get(_ABOUT)
        if not isinstance(first, dict):
            raise UnreadableFileError(f"{path} is no file that `palestra eval --out` wrote; choose another")
        changed = [key for key in {**first, **about} if first.get(key) != about.get(key)]
        if changed:
            key, more = changed[0], f" ({len(changed)} differences)" if len(changed) > 1 else ""
            raise SettingError(
                f"{path} was made with {key} = {first.get(key)!r}, not {about.get(key)!r}{more}; resume with the same "
                "settings, or write to another file"
            )

    def load(self, problems: Sequence[Problem], samples_per_case: int) -> dict[str, list[Rollout]]:
        """The attempts of the problems whose attempts are complete, by problem id. The file keeps only these.

        Attempts with an error of their environment are made again.
        """
        found: dict[str, list[Rollout]] = {problem.id: [] for problem in problems}
        for row in read_jsonl(self._path):
            if row.get("problem_id") in found and row.get("error") is None:
                found[row["problem_id"]].append(rollout_from_dict(row))
        complete = {name: rollouts for name, rollouts in found.items() if len(rollouts) == samples_per_case}
        kept = (rollout_to_dict(rollout) for rollouts in complete.values() for rollout in rollouts)
        write_jsonl(self._path, chain([{_ABOUT: self._about}], kept))
        return complete

    def add(self, groups: Sequence[Group]) -> None:
        append_jsonl(self._path, (rollout_to_dict(rollout) for group in groups for rollout in group.rollouts))
