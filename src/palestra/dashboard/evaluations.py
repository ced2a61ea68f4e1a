"""The evaluations of a run: before, during and after training, with intervals, and which problems changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from palestra.core.run_folder import EvalName, RunFolder
from palestra.dashboard.rollout_index import RolloutIndex
from palestra.evals.report import Rate, pair

_MAX_PROBLEMS = 200


def evaluations(folder: RunFolder) -> dict[str, Any]:
    """Each evaluation on disk, and the problems that flipped between the first and the last."""
    index = RolloutIndex(folder)
    names = folder.eval_names()
    rows = {str(name): index.rows_of(str(name)) for name in names}
    last_step = max((row["step"] for row in folder.metrics()), default=0)
    found = [_evaluation(name, rows[str(name)], last_step) for name in names]
    flips = _flips(str(names[0]), str(names[-1]), rows) if len(names) > 1 else None
    return {"evaluations": found, "flips": flips}


def held_out(folder: RunFolder) -> dict[str, bool] | None:
    """Which problems passed after training; None where that was not scored."""
    if not folder.eval_file("after").is_file():
        return None
    return majority(RolloutIndex(folder).rows_of("after"))


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
