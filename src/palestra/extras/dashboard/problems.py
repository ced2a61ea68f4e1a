"""One problem over training: the attempts of each visit, and when the verdict changed."""

from __future__ import annotations

import json
from itertools import groupby, pairwise
from typing import Any

from palestra.core.errors import PalestraError, SettingError
from palestra.core.files import read_regular
from palestra.core.run_folder import STATE, RunFolder
from palestra.evals.case_rates import CaseKind, CaseRates
from palestra.extras.dashboard.rollout_index import RolloutIndex, UnknownRollout
from palestra.extras.dashboard.rollout_row import shown

_SORTS = ("flips", "hardest", "id")
_VISIT = "WITH visits AS (SELECT problem_id, group_id, min(id) AS first_id, step, count(*) AS attempts, " \
    "avg(passed) AS rate FROM rollouts WHERE kind = 'train' GROUP BY problem_id, group_id)"  # fmt: skip


def problems(index: RolloutIndex, sort: str, limit: int, start: int) -> dict[str, Any]:
    """The problems of training, with how their pass rates went."""
    if sort not in _SORTS:
        raise SettingError(f"sort={sort[:40]!r} is unknown; expected one of {', '.join(_SORTS)}")
    kinds = _sampling(index.folder)
    with index.open() as db:
        visits = db.execute(f"{_VISIT} SELECT * FROM visits ORDER BY problem_id, first_id").fetchall()
        rows = []
        for problem, found in groupby(visits, lambda visit: visit["problem_id"]):
            own = list(found)
            rates = [visit["rate"] for visit in own]
            flips = sum(_flip(a, b) is not None for a, b in pairwise(rates))
            rows.append(
                {
                    "problem_id": problem,
                    "attempts": sum(visit["attempts"] for visit in own),
                    "groups": len(own),
                    "first_rate": rates[0],
                    "last_rate": rates[-1],
                    "flips": flips,
                    "sampling": None if kinds is None else kinds.get(problem, "untested"),
                    "first_id": own[0]["first_id"],
                }
            )
        order = {"flips": lambda row: -row["flips"], "hardest": lambda row: row["last_rate"], "id": lambda row: 0}
        rows.sort(key=order[sort])
        page = rows[start : start + limit]
        for row in page:
            found_id = row.pop("first_id")
            row["question"] = db.execute("SELECT question FROM rollouts WHERE id = ?", (found_id,)).fetchone()[0]
    following = start + limit
    return {"problems": page, "next": str(following) if following < len(rows) else None, "total": len(rows)}


def _sampling(folder: RunFolder) -> dict[str, CaseKind] | None:
    """The kinds of a run's cases by its newest checkpoint, with train.sampling = learnable; None without it."""
    try:
        config, last = folder.config, folder.last_checkpoint()
        if config.train.sampling != "learnable" or last is None:
            return None
        state = json.loads(read_regular(last / STATE))
        rates = CaseRates(config.train.sampling_half_life)
        rates.load(state.get("cases", {}), int(state["step"]))
        return {case: rates.kind(case, config.rollout.group_size) for case in rates.cases}
    except (PalestraError, ArithmeticError, AttributeError, OSError, ValueError, TypeError, KeyError, RecursionError):
        return None  # a file from elsewhere may hold anything


def problem(index: RolloutIndex, problem_id: str, kind: str = "train") -> dict[str, Any]:
    """All visits to one problem: before, the steps of training, evaluations between them, after.

    Held-out problems may be numbered like those of training and be others: where training (or, by `kind`, the
    evaluations) has the id, of the other side only what asks the same belongs to it.
    """
    with index.open() as db:
        found = db.execute("SELECT * FROM rollouts WHERE problem_id = ? ORDER BY id", (problem_id,)).fetchall()
    if not found:
        raise UnknownRollout(f"there is no problem {problem_id[:80]!r} in this run")
    own = [row for row in found if (row["kind"] == "train") == (kind == "train")] or found
    questions = {row["question"] for row in own}
    rows = [row for row in found if row["question"] in questions]
    visits = []
    for group_id, group in groupby(rows, lambda row: row["group_id"]):
        members = list(group)
        visits.append(
            {
                "kind": members[0]["kind"],
                "step": members[0]["step"],
                "group": group_id,
                "pass_rate": sum(row["passed"] for row in members) / len(members),
                "reward_mean": sum(row["reward"] for row in members) / len(members),
                "rollouts": [shown(row) for row in members],
            }
        )
    place = {"before": 0, "after": 2}
    # before, by step (training, then the evaluation after it), after
    visits.sort(key=lambda v: (place.get(v["kind"], 1), v["step"], v["kind"] != "train"))
    for before, visit in zip([None, *visits], visits, strict=False):
        visit["flip"] = None if before is None else _flip(before["pass_rate"], visit["pass_rate"])
    return {"problem_id": problem_id, "question": own[0]["question"], "visits": visits}


def _flip(before: float, after: float) -> str | None:
    """Whether most attempts changed from failed to passed, or back."""
    if (before > 0.5) == (after > 0.5):
        return None
    return "fixed" if after > 0.5 else "broken"
