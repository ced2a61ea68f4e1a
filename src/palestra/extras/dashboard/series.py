"""Metrics as columns, for charts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.core.files import parse_row, read_from
from palestra.evals.rollout_stats import CALL_PROBLEM_RATES
from palestra.runs.reader import merge_last_step, sample

Row = Mapping[str, Any]
_SPARKLINE_POINTS = 60
# of a step, in their order; "agent_loop" is what is left: tools, environments and measures that rollouts waited for
_PHASES = "prefill decode planning template agent_loop learner packing preparing publishing records".split()

# title, unit, and the names or beginnings of names ("score/") of a chart, in the order of display
_CHARTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("Reward", "", ("reward_mean", "reward_max", "reward_min")),
    ("Pass rate", "%", ("pass_rate", "eval/pass_rate")),
    ("Measures", "", ("score/",)),
    ("Measures passed", "%", ("pass_rate/",)),
    ("Groups without signal", "%", ("equal_reward_groups", "failed_groups", "passed_groups")),
    ("Rollouts with a positive advantage", "", ("reinforced_rollouts", "reinforced_without_tools")),
    ("Tool calls per rollout", "", ("tool_calls_mean",)),
    ("Tool errors", "%", ("tool_error_rate", *CALL_PROBLEM_RATES.values())),
    ("Calls in another format", "%", ("other_format_rate", "unread_call_rate", "unrun_call_rate")),
    ("Turns per rollout", "", ("turns_mean",)),
    (
        "Sampled tokens per rollout",
        "tokens",
        ("completion_length_mean", "completion_length_max", "conversation_length_max"),
    ),
    ("Cut off", "%", ("truncation_rate", "context_full_rate", "looping_rate")),
    ("Entropy", "nats", ("entropy", "optim/entropy")),
    ("KL", "nats", ("kl", "kl_reference", "kl_sampler", "optim/kl_sample_train_v1", "optim/kl_sample_train_v2")),
    ("Sampler gap", "nats", ("sampler_gap_mean", "sampler_gap_max")),
    ("Other experts in the learner", "%", ("routing_mismatch",)),
    ("Importance ratio", "", ("ratio_mean", "ratio_max")),
    ("Clipped", "%", ("clip_fraction_low", "clip_fraction_high")),
    ("Advantage", "", ("advantage_max", "advantage_mean", "advantage_min")),
    ("Loss", "", ("loss", "policy_loss", "echo_loss", "distill_loss")),
    ("Distillation", "nats", ("distill_divergence",)),
    ("Signs of a hint", "%", ("hint_leak_rate",)),
    ("Gradient norm", "", ("grad_norm",)),
    ("Learning rate", "", ("learning_rate", "optim/lr")),
    ("Tokens per second", "tokens/s", ("sample_tokens_per_second", "train_tokens_per_s")),
    ("Time of a step", "s", ("sample_seconds", "train_seconds")),
    ("Time by phase", "s", tuple(f"{phase}_seconds" for phase in _PHASES)),
    ("Memory", "GiB", ("peak_memory_gib",)),
    ("Staleness", "steps", ("staleness_max", "stale_groups_dropped")),
    ("Failures", "", ("rollout_failures", "measure_errors", "hung_calls", "measure_errors/")),
)
# a metric without a chart of its own is a share by its name
_SHARE = re.compile(r"pass_rate|(?<!learning)_rate$|^tool_use|truncat|fraction|share")
_NOT_DRAWN = (
    "step elapsed_seconds rollouts groups sampled_tokens tokens_computed tokens_trained tools_offered reward_std"
).split()


def read_rows(path: Path, start: int = 0) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of metrics.jsonl from a byte on, and where the next read starts; from 0 if it was cut back."""
    data, start = read_from(path, start)
    whole = data[: data.rfind(b"\n") + 1]
    rows = [row for row in map(parse_row, whole.splitlines()) if row and isinstance(row.get("step"), int | float)]
    return rows, start + len(whole)


def by_step(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """One row a step: an evaluation writes a second one for its step."""
    found: dict[float, list[Row]] = {}
    for row in rows:
        found.setdefault(row["step"], []).append(row)
    return [merge_last_step(found[step]) for step in sorted(found)]


def columns(rows: Sequence[Row]) -> dict[str, Any]:
    """{"step": […], "series": {name: […]}}; null where a step has no value."""
    names = dict.fromkeys(name for row in rows for name in row if name != "step")
    series = {name: [_number(row.get(name)) for row in rows] for name in names}
    drawn = {name: values for name, values in series.items() if any(value is not None for value in values)}
    return {"step": [row["step"] for row in rows], "series": drawn}


def charts(names: Sequence[str]) -> list[dict[str, Any]]:
    """Metric names grouped into charts, each name once; unknown names come last."""
    left = [name for name in names if name not in _NOT_DRAWN]
    found = []
    for title, unit, known in _CHARTS:
        mine = [name for key in known for name in left if name == key or (key.endswith("/") and name.startswith(key))]
        if mine:
            left = [name for name in left if name not in mine]
            found.append({"title": title, "unit": unit, "names": mine})
    units = {name: "%" if _SHARE.search(name) else "" for name in left}
    return found + [{"title": name.replace("_", " "), "unit": unit, "names": [name]} for name, unit in units.items()]


def sparkline(rows: Sequence[Row]) -> list[float]:
    values = [{"y": value} for row in rows if (value := _number(row.get("reward_mean"))) is not None]
    return [point["y"] for point in sample(values, _SPARKLINE_POINTS)]


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None
