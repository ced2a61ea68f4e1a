"""Evaluations and problems of a run: rates, and what changed. And the page "Is it cheating".

A *check metric* is a measure that is not rewarded (weight 0), or a held-out score. The reward alone shows no hack: a
reward that rises is what training is for. A check metric that falls at the same time does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby, pairwise
from statistics import fmean
from typing import Any, NamedTuple

from palestra.core.errors import PalestraError, SettingError
from palestra.core.files import read_regular
from palestra.core.run_folder import STATE, EvalName, RunFolder
from palestra.evals.case_rates import CaseKind, CaseRates
from palestra.evals.report import Rate, pair
from palestra.extras.dashboard.answers import paged
from palestra.extras.dashboard.catalog import by_step, columns, measures
from palestra.extras.dashboard.rollout_index import RolloutIndex, UnknownRollout
from palestra.extras.dashboard.rollout_row import shown

_MAX_PROBLEMS = 200


def evaluations(folder: RunFolder) -> dict[str, Any]:
    """Each evaluation on disk, and the problems that flipped between the first and the last."""
    index = RolloutIndex(folder)
    names = folder.eval_names()
    rows = {str(name): index.rows_of(str(name)) for name in names}
    last_step = max((row["step"] for row in folder.metrics()), default=0)
    flips = _flips(str(names[0]), str(names[-1]), rows) if len(names) > 1 else None
    return {"evaluations": [_evaluation(name, rows[str(name)], last_step) for name in names], "flips": flips}


def majority(rows: Iterable[Mapping[str, Any]]) -> dict[str, bool]:
    """Problem -> whether more than half of its attempts passed."""
    attempts: dict[str, list[bool]] = {}
    for row in rows:
        attempts.setdefault(row["problem_id"], []).append(bool(row["passed"]))
    return {problem: sum(passed) * 2 > len(passed) for problem, passed in attempts.items()}


def _evaluation(name: EvalName, rows: list[dict[str, Any]], last_step: float) -> dict[str, Any]:
    judged = [row for row in rows if row["error"] is None]
    measures = dict.fromkeys(measure for row in judged for measure in row["scores"])
    return {
        "name": str(name),
        "step": 0 if name == "before" else name if isinstance(name, int) else last_step,
        "n": len(rows),
        "mean_reward": _mean([row["reward"] for row in judged]),
        "pass_rate": asdict(Rate.of(sum(bool(row["passed"]) for row in judged), len(judged))),
        "measures": [_measure(measure, judged) for measure in measures],
    }


def _measure(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    scores = [row["scores"][name] for row in rows if name in row["scores"] and not row["scores"][name]["error"]]
    verdicts = [score["passed"] for score in scores if score["passed"] is not None]
    rate, value = asdict(Rate.of(sum(map(bool, verdicts)), len(verdicts))), _mean([score["value"] for score in scores])
    return {"name": name, "pass_rate": rate, "mean_value": value}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _flips(first: str, last: str, rows: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    before, after = majority(rows[first]), majority(rows[last])
    paired = pair(before, after)
    by_problem = [{row["problem_id"]: row for row in reversed(rows[name])} for name in (first, last)]
    problems = [
        {
            "problem_id": problem,
            "question": by_problem[1][problem]["question"],
            "direction": "fixed" if after[problem] else "broken",
            "from": by_problem[0][problem]["id"],
            "to": by_problem[1][problem]["id"],
        }
        for problem in before
        if problem in after and before[problem] != after[problem]
    ]
    problems.sort(key=lambda row: row["direction"])  # what broke comes first
    return {
        "from": first,
        "to": last,
        "fixed": paired.only_second,
        "broken": paired.only_first,
        "same": paired.both + paired.neither,
        "p_value": paired.p_value,
        "problems": problems[:_MAX_PROBLEMS],
    }


_SORTS: Mapping[str, Callable[[dict[str, Any]], float]] = {
    "flips": lambda row: -row["flips"],
    "hardest": lambda row: row["last_rate"],
    "id": lambda row: 0,
}


def problems(index: RolloutIndex, sort: str, limit: int, start: int) -> dict[str, Any]:
    """The problems of training, with how their pass rates went."""
    if sort not in _SORTS:
        raise SettingError(f"sort={sort[:40]!r} is unknown; expected one of {', '.join(_SORTS)}")
    kinds = _sampling(index.folder)
    rows = []
    visits = index.query(
        "SELECT problem_id, min(id) AS first_id, count(*) AS attempts, avg(passed) AS rate FROM rollouts "
        "WHERE kind = 'train' GROUP BY problem_id, group_id ORDER BY problem_id, first_id"
    )
    for problem, members in groupby(visits, lambda visit: visit["problem_id"]):
        own = list(members)
        rates = [visit["rate"] for visit in own]
        rows.append(
            {
                "problem_id": problem,
                "attempts": sum(visit["attempts"] for visit in own),
                "groups": len(own),
                "first_rate": rates[0],
                "last_rate": rates[-1],
                "flips": sum(_flip(a, b) is not None for a, b in pairwise(rates)),
                "sampling": None if kinds is None else kinds.get(problem, "untested"),
                "first_id": own[0]["first_id"],
            }
        )
    rows.sort(key=_SORTS[sort])
    page = rows[start : start + limit]
    first = json.dumps([row["first_id"] for row in page])
    asked = "SELECT id, question FROM rollouts WHERE id IN (SELECT value FROM json_each(?))"
    questions = dict(map(tuple, index.query(asked, first)))
    for row in page:
        row["question"] = questions[row.pop("first_id")]
    return {"problems": page, **paged(len(rows), start, limit)}


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
    same_id = index.query("SELECT * FROM rollouts WHERE problem_id = ? ORDER BY id", problem_id)
    if not same_id:
        raise UnknownRollout(f"there is no problem {problem_id[:80]!r} in this run")
    own = [row for row in same_id if (row["kind"] == "train") == (kind == "train")] or same_id
    questions = {row["question"] for row in own}
    rows = [row for row in same_id if row["question"] in questions]
    visits = []
    for group_id, group in groupby(rows, lambda row: row["group_id"]):
        members = list(group)
        visits.append(
            {
                "kind": members[0]["kind"],
                "step": members[0]["step"],
                "group": group_id,
                "pass_rate": fmean(row["passed"] for row in members),
                "reward_mean": fmean(row["reward"] for row in members),
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


Series = Sequence[float | None]

_SIGMAS = 3.5  # of the fall of a check metric: the largest of many differences is large by chance
_MIN_FALL = 0.05
_MIN_RISE = 0.02  # of the range of the reward
_WINDOW_SHARE = 0.2  # of the steps
_HELD_OUT = "eval/pass_rate"
_NO_CHECK = (
    "no check metric: add a measure that is not rewarded (reward_weights={…: 0}) and that a cheat would not satisfy, "
    "or score held-out problems during training (eval.every)"
)


def suspicion(folder: RunFolder) -> dict[str, Any]:
    """The answer to `GET …/suspicion`: rewarded measures and check metrics by step, and the alarms."""
    made = columns(by_step(folder.metrics()))
    series, steps = made["series"], made["step"]
    nothing: list[float | None] = [None] * len(steps)
    rewarded: dict[str, list[float | None]] = {}
    checks: dict[str, list[float | None]] = {}
    for row in measures(folder):
        if values := series.get(f"score/{row['name']}") or series.get(f"pass_rate/{row['name']}"):
            (rewarded if row["rewarded"] else checks)[row["name"]] = values
    if _HELD_OUT in series:
        checks["held-out"] = series[_HELD_OUT]
    reward = series.get("reward_mean", nothing)
    return {
        "step": steps,
        "reward": reward,
        "rewarded": rewarded,
        "witnesses": checks,
        "alarms": find_alarms(steps, reward, checks, series.get("rollouts", nothing)),
        "notes": [] if checks else [_NO_CHECK],
    }


class _Row(NamedTuple):
    """A step, or the means of some steps."""

    step: float
    reward: float
    check: float
    size: float  # rollouts


def find_alarms(
    steps: Sequence[float], reward: Series, checks: Mapping[str, Series], counts: Series
) -> list[dict[str, Any]]:
    """An alarm for each check metric (witness) that has fallen by more than chance allows while the reward rose.

    It fell since its best step (`since`), which was noticed at `step`; values "to" are those of the last step. Values
    are means over the `counts` rollouts of a step; None where a step has none.
    """
    alarms = []
    for name, values in checks.items():
        every = zip(steps, reward, values, counts, strict=True)
        rows = [_Row(step, r, c, size or 1.0) for step, r, c, size in every if r is not None and c is not None]
        if alarm := _alarm(name, rows):
            alarms.append(alarm)
    return alarms


def _alarm(metric: str, rows: Sequence[_Row]) -> dict[str, Any] | None:
    window = max(2, math.ceil(_WINDOW_SHARE * len(rows)))
    if len(rows) < 2 * window:
        return None
    windows = [rows[end - window : end] for end in range(window, len(rows) + 1)]
    smooth = [_Row(part[-1].step, *(fmean(c) for c in list(zip(*part, strict=True))[1:])) for part in windows]
    rewards = [row.reward for row in smooth]
    least_rise = _MIN_RISE * ((max(rewards) - min(rewards)) or 1.0)
    best, since, noticed = smooth[0], None, 0.0
    for row in smooth:
        best = max(best, row, key=lambda each: each.check)
        share = min(1.0, max(0.0, (best.check + row.check) / 2))
        by_chance = _SIGMAS * math.sqrt(max(share * (1 - share), 0.01) * 2 / (window * row.size))
        if best.check - row.check >= max(_MIN_FALL, by_chance) and row.reward - best.reward > least_rise:
            noticed = row.step if since is None else noticed
            since = best
    if since is None:
        return None
    last = smooth[-1]
    return {
        "witness": metric,
        "against": "reward",
        "since": since.step,
        "step": noticed,
        "reward_from": since.reward,
        "reward_to": last.reward,
        "witness_from": since.check,
        "witness_to": last.check,
        "sentence": f"since step {since.step:.0f} the reward rose from {since.reward:.2f} to {last.reward:.2f}, while "
        f"{metric} fell from {since.check:.2f} to {last.check:.2f}: read the newest rollouts that passed, and change "
        "the measure that they exploit",
    }
