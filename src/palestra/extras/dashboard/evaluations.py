"""Evaluations of one run (rates with intervals, problems that changed), and comparisons of several runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import accumulate, combinations
from typing import Any

from palestra.core.run_folder import EvalName, RunFolder
from palestra.evals.report import Rate, pair
from palestra.extras.dashboard.rollout_index import RolloutIndex
from palestra.extras.dashboard.series import by_step, columns
from palestra.runs.compare import differing_keys, settings_of

_MAX_PROBLEMS = 200
_CURVES = ("reward_mean", "pass_rate", "eval/pass_rate", "entropy", "completion_length_mean", "tool_calls_mean")


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
        "mean_reward": sum(row["reward"] for row in judged) / len(judged) if judged else None,
        "pass_rate": asdict(Rate.of(sum(bool(row["passed"]) for row in judged), len(judged))),
        "measures": [_measure(measure, judged) for measure in measures],
    }


def _measure(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    scores = [row["scores"][name] for row in rows if name in row["scores"] and not row["scores"][name]["error"]]
    verdicts = [score["passed"] for score in scores if score["passed"] is not None]
    values = [score["value"] for score in scores]
    return {
        "name": name,
        "pass_rate": asdict(Rate.of(sum(map(bool, verdicts)), len(verdicts))),
        "mean_value": sum(values) / len(values) if values else None,
    }


def _flips(first: str, last: str, rows: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    before, after = majority(rows[first]), majority(rows[last])
    found = pair(before, after)
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
        "fixed": found.only_second,
        "broken": found.only_first,
        "same": found.both + found.neither,
        "p_value": found.p_value,
        "problems": problems[:_MAX_PROBLEMS],
    }


def compare(folders: Mapping[str, RunFolder]) -> dict[str, Any]:
    """The answer to `GET api/compare`, for each run by its id."""
    settings = {run: settings_of(folder) for run, folder in folders.items()}
    reports = {run: folder.report() or {} for run, folder in folders.items()}
    return {
        "settings": [
            {"key": key, "values": {run: found.get(key) for run, found in settings.items()}}
            for key in differing_keys([*settings.values()])
        ],
        "curves": {run: _curves(folder) for run, folder in folders.items()},
        "evaluations": {
            run: {name: report[name]["pass_rate"] for name in ("before", "after") if report.get(name)}
            for run, report in reports.items()
        },
        "flips": _flips_between(folders),
    }


def _curves(folder: RunFolder) -> dict[str, Any]:
    """By step, by the tokens sampled so far, and by the seconds that had passed."""
    rows = by_step(folder.metrics())
    made = columns(rows)
    step_s = (row.get("sample_seconds", 0.0) + row.get("train_seconds", 0.0) for row in rows)
    seconds = [row.get("elapsed_seconds", total) for row, total in zip(rows, accumulate(step_s), strict=True)]
    return {
        "step": made["step"],
        "tokens": list(accumulate(row.get("sampled_tokens", 0.0) for row in rows)),
        "seconds": seconds,
        "series": {name: values for name, values in made["series"].items() if name in _CURVES},
    }


def _flips_between(folders: Mapping[str, RunFolder]) -> list[dict[str, Any]]:
    """Held-out problems after training, of each pair of runs that share some."""
    passed = {
        run: majority(RolloutIndex(folder).rows_of("after"))
        for run, folder in folders.items()
        if folder.eval_file("after").is_file()
    }
    rows = []
    for a, b in combinations(passed, 2):
        found = pair(passed[a], passed[b])
        if found.both + found.only_first + found.only_second + found.neither:
            counts = {"both": found.both, "only_a": found.only_first, "only_b": found.only_second}
            rows.append({"a": a, "b": b, **counts, "neither": found.neither, "p_value": found.p_value})
    return rows
