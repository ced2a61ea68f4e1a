"""The page "Is it cheating": a run's rewarded measures and check metrics, and its successes by shape."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

from palestra.core.run_folder import RunFolder
from palestra.extras.dashboard.reward_hacking import (
    AttemptSummary,
    SuccessCluster,
    find_alarms,
    find_clusters,
    suspects,
)
from palestra.extras.dashboard.rollout_index import RolloutIndex
from palestra.extras.dashboard.rollout_row import shown
from palestra.extras.dashboard.summaries import by_step, columns, measures

_MAX_ATTEMPTS = 20_000  # that are looked at, evenly spaced
_HELD_OUT = "eval/pass_rate"
_MAX_EXAMPLES = 20
_MAX_SHOWN = 50
_NO_CHECK = (
    "no check metric: add a measure that is not rewarded (reward_weights={…: 0}) and that a cheat would not satisfy, "
    "or score held-out problems during training (eval.every)"
)


def reward_hacking(index: RolloutIndex) -> dict[str, Any]:
    """The answer to `GET …/suspicion`."""
    series = measure_series(index.folder)
    notes = [] if series["witnesses"] else [_NO_CHECK]
    (shapes, clusters), has_alarm = _shapes(index), bool(series["alarms"]) if series["witnesses"] else None
    listed = [
        {"score": each.score, "why": list(each.why), "rollout": shown(index.row(each.attempt.id))}
        for each in suspects(clusters, _MAX_SHOWN, has_alarm=has_alarm)
    ]
    return {**series, **shapes, "suspects": listed, "notes": notes}


def ids_of_shape(index: RolloutIndex, shape: str) -> list[int]:
    """The rollouts of a cluster, by its name."""
    return [member.id for each in _shapes(index)[1] if str(each.shape) == shape for member in each.members]


def measure_series(folder: RunFolder) -> dict[str, Any]:
    """The rewarded measures and the check metrics by step, and the alarms."""
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
    alarms = find_alarms(steps, reward, checks, series.get("rollouts", nothing))
    return {
        "step": steps,
        "reward": reward,
        "rewarded": rewarded,
        "witnesses": checks,
        "alarms": [
            {name.replace("metric", "witness"): value for name, value in asdict(alarm).items()}
            | {"against": "reward", "sentence": alarm.sentence}
            for alarm in alarms
        ],
    }


def attempts_of(rows: Sequence[Any], rewarded: Mapping[str, bool]) -> Iterator[AttemptSummary]:
    """Rows of the index as attempts; measures without a weight count as rewarded."""
    highest = max((row["reward"] for row in rows), default=0.0)
    for row in rows:
        scores = json.loads(row["scores"])
        verdicts = {n: s["passed"] for n, s in scores.items() if s["passed"] is not None and not s["error"]}
        counted = [passed for name, passed in verdicts.items() if rewarded.get(name, True)]
        success = all(counted) if counted else row["reward"] > highest / 2
        yield AttemptSummary(
            id=row["id"],
            step=row["step"],
            success=success and row["error"] is None,
            tools=tuple(json.loads(row["tools"])),
            tokens=row["sampled_tokens"],
            text=row["answer"],
            checks={name: passed for name, passed in verdicts.items() if not rewarded.get(name, True)},
        )


Shapes = tuple[dict[str, Any], list[SuccessCluster]]  # the clusters as the page gets them, and the clusters


def _shapes(index: RolloutIndex) -> Shapes:
    newest = index.query("SELECT max(id) FROM rollouts WHERE kind = 'train'")[0][0]
    if newest is None:
        return {"clusters": []}, []
    return _find_shapes(index.folder, newest, tuple((row["name"], row["rewarded"]) for row in measures(index.folder)))


@lru_cache(maxsize=8)
def _find_shapes(folder: RunFolder, newest: int, weights: tuple[tuple[str, bool], ...]) -> Shapes:
    """The clusters, computed again when there are new rollouts."""
    index = RolloutIndex(folder)
    count = index.query("SELECT count(*) FROM rollouts WHERE kind = 'train'")[0][0]
    every = -(-count // _MAX_ATTEMPTS)
    rows = index.query("SELECT * FROM rollouts WHERE kind = 'train' AND id % ? = 0 ORDER BY id", every)
    steps, clusters = find_clusters(list(attempts_of(rows, dict(weights))))
    by_id = {row["id"]: row for row in rows}
    return {"cluster_steps": steps, "clusters": [_cluster(cluster, by_id) for cluster in clusters]}, clusters


def _cluster(cluster: SuccessCluster, rows: Mapping[int, Any]) -> dict[str, Any]:
    members = cluster.members
    return {
        "shape": str(cluster.shape),
        **asdict(cluster.shape),
        "count": len(members),
        "first_step": members[0].step,
        "growth": cluster.growth,
        "share": list(cluster.share),
        "witness_rate": cluster.confirmed_rate,
        "earliest": shown(rows[members[0].id]),
        "examples": [member.id for member in members[-_MAX_EXAMPLES:]],
    }
