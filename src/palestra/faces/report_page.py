"""report.html: one file that opens anywhere, without a network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.faces.charts import Bar, Marker, Point, bars, curve

_TEMPLATE = Path(__file__).with_name("report_page.html")


def render(report: Mapping[str, Any]) -> str:
    """The page for the data of a report.json."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page.filters |= {"percent": _percent, "call": _call, "minutes": _minutes, "plain": _plain}
    changes = _shown(report["changes"])
    steps = [row for row in report["metrics"] if "reward_mean" in row]
    return page.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        report=report,
        overall=report["changes"][-1],
        changes=changes,
        steps=len(steps),
        bars=Markup(bars([(c["name"], _pair(c)) for c in changes], title="Pass rates before and after training")),
        pass_curve=Markup(
            curve(
                _points(steps, "pass_rate"), percent=True, markers=_held_out(report, steps), title="Pass rate by step"
            )
        ),
        reward_curve=Markup(curve(_points(steps, "reward_mean"), percent=False, title="Reward by step")),
        settings=_flat(report["config"]),
    )


def _shown(changes: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """With a single measure, the row for all of them together says nothing new."""
    return changes if len(changes) > 2 else changes[:1]


def _pair(change: Mapping[str, Any]) -> list[Bar]:
    return [Bar(kind, *(change[kind][key] for key in ("rate", "low", "high"))) for kind in ("before", "after")]


def _points(steps: Sequence[Mapping[str, float]], key: str) -> list[Point]:
    return [(row["step"], row[key]) for row in steps if key in row]


def _held_out(report: Mapping[str, Any], steps: Sequence[Mapping[str, float]]) -> list[Marker]:
    """The evaluations before, during and after, where they belong on the axis of steps."""
    last = max((row["step"] for row in steps), default=0)
    between = [(row["step"], row["eval/pass_rate"]) for row in report["metrics"] if "eval/pass_rate" in row]
    ends = [("before", 0.0, report["before"]["pass_rate"]), ("after", float(last), report["after"]["pass_rate"])]
    return [Marker(x, rate, rate, rate, f"held-out cases at step {x}: {_percent(rate)}") for x, rate in between] + [
        Marker(x, rate["rate"], rate["low"], rate["high"], f"held-out cases {when}: {_percent(rate['rate'])}")
        for when, x, rate in ends
    ]


def _flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in config.items():
        rows += _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", _plain(value))]
    return rows


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def _call(call: Mapping[str, Any]) -> str:
    if call.get("error"):
        return f"{call['name'] or 'a tool'}, in a form that cannot be read"
    arguments = ", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in call["arguments"].items())
    return f"{call['name']}({arguments})"
