"""The report of a run: report.json for programs, report.html for people."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.core.config import flatten
from palestra.core.files import write_json, write_text
from palestra.core.machine import installed_version
from palestra.core.messages import show_call
from palestra.core.run_folder import RunFolder
from palestra.core.types import Rollout, ToolCall
from palestra.evals.evidence import Finding
from palestra.evals.report import Change, EvalReport, compare, compare_means, pick_transcripts
from palestra.evals.run_report.charts import Marker, Point, bars, curve

if TYPE_CHECKING:
    from jinja2 import Template

_TEMPLATE = Path(__file__).with_name("page.html")


def render(report: Mapping[str, Any]) -> str:
    """The page for the data of a report.json."""
    from markupsafe import Markup

    # with a single measure, the row for all measures is the same again
    changes = report["changes"] if len(report["changes"]) > 2 else report["changes"][:1]
    means = []
    for change in report.get("mean_changes", ()):  # reports of 0.1 have none
        sides = (change["before"], change["after"])  # with the lowest and the highest value seen: its scale
        lowest, highest = min(s["lowest"] for s in sides), max(s["highest"] for s in sides)
        means.append({**change, "lowest": lowest, "highest": highest})
    overall = report["changes"][-1] if report["changes"] else None
    rates_are_equal = overall is not None and overall["before"]["rate"] == overall["after"]["rate"]
    pairs = [(change["name"], {when: change[when] for when in ("before", "after")}) for change in changes]
    steps = [row for row in report["metrics"] if "reward_mean" in row]
    evaluations = {when: report[when] for when in ("before", "after") if report[when] is not None}
    # reports of Palestra 0.1 do not say which cases were scored
    on_training = any(evaluation.get("split") == "train" for evaluation in evaluations.values())
    scored = "training" if on_training else "held-out"
    markers = _evaluations(report, steps, scored)
    values = dict(
        report=report,
        overall=overall,
        evaluations=evaluations,
        scored=scored,
        changes=changes,
        mean_changes=means,
        graded=means[0] if means and rates_are_equal else None,
        capability=(report.get("capability") or {}).get("text"),
        stages=report.get("stages", ()),
        findings=report.get("findings", ()),
        steps=len(steps),
        bars=Markup(bars(pairs, title="Pass rates before and after training")),
        pass_curve=Markup(curve(_points(steps, "pass_rate"), percent=True, markers=markers, title="Pass rate by step")),
        reward_curve=Markup(curve(_points(steps, "reward_mean"), percent=False, title="Reward by step")),
        settings=[(key, as_text(value)) for key, value in flatten(report["config"]).items()],
    )
    return fill_template(_TEMPLATE, _FILTERS, values)


def fill_template(template: Path, filters: Mapping[str, Callable[..., Any]], values: Mapping[str, Any]) -> str:
    """A page of HTML: values are escaped, and a name that is missing is an error. Every page has the filter as_text."""
    return _compiled(template, tuple(filters.items())).render(values)


@cache
def _compiled(template: Path, filters: tuple[tuple[str, Callable[..., Any]], ...]) -> Template:
    from jinja2 import Environment, StrictUndefined

    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page.filters |= {"as_text": as_text, **dict(filters)}
    return page.from_string(template.read_text(encoding="utf-8"))


def _points(steps: Sequence[Mapping[str, float]], key: str) -> list[Point]:
    return [(row["step"], row[key]) for row in steps if key in row]


def _evaluations(report: Mapping[str, Any], steps: Sequence[Mapping[str, float]], scored: str) -> list[Marker]:
    """The evaluations before, during and after training, each at its step."""
    rows = [row for row in report["metrics"] if "eval/pass_rate" in row]
    found = [(row["step"], f"at step {row['step']}", {"rate": row["eval/pass_rate"]}) for row in rows]
    ends = {"before": 0, "after": max((row["step"] for row in steps), default=0)}
    found += [(step, when, report[when]["pass_rate"]) for when, step in ends.items() if report[when] is not None]
    markers = []
    for step, name, of in found:
        rate, label = of["rate"], f"{scored} cases {name}: {_percent(of['rate'])}"
        markers.append(Marker(step, rate, of.get("low", rate), of.get("high", rate), label))
    return markers


def as_text(value: Any) -> str:
    """Text as it is; all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


_FILTERS: dict[str, Callable[..., Any]] = {
    "percent": _percent,
    "call": lambda call: show_call(ToolCall("", call["name"], call["arguments"], call.get("error"))),
    "minutes": lambda seconds: f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min",
    # how many messages came before the model's first word
    "opening": lambda rows: next((i for i, m in enumerate(rows) if m["role"] not in ("system", "user")), len(rows)),
}


def write_report(
    folder: RunFolder,
    before: EvalReport | None,
    after: EvalReport | None,
    metrics: Sequence[Mapping[str, float]],
    seconds: float,
    findings: Sequence[Finding] = (),
    *,
    device: str = "",
) -> Path:
    """Write report.json and report.html into the run folder, and return the path of the page.

    `before` and `after` are None if the environment cannot be evaluated here, as over the wire. What the run is
    (agent, instructions, tools) is read from run.json. `device` is the name of the GPU; empty for a CPU.
    """
    record, config = folder.record, folder.config
    changes, means, pairs = [], [], []
    if before is not None and after is not None:
        changes, means = compare(before, after), compare_means(before, after)
        pairs = pick_transcripts(before.rollouts, after.rollouts)
    data = {
        "agent": record.get("agent") or record.get("name"),
        "model": config.model.name,
        "run": folder.path.name,
        "created": record.get("created"),
        "source": record.get("source"),
        "seed": config.seed,
        "seconds": seconds,
        "instructions": str(record.get("instructions") or ""),
        "tools": [str(tool.get("function", tool).get("name")) for tool in record.get("tools") or ()],
        "before": before and before.to_dict(),
        "after": after and after.to_dict(),
        "capability": record.get("capability"),
        "stages": record.get("stages", []),
        "findings": [finding.to_dict() for finding in findings],
        "changes": [_change(change) for change in changes],
        "mean_changes": [_change(change) for change in means],
        "metrics": list(metrics),
        "transcripts": [{"before": _transcript(first), "after": _transcript(second)} for first, second in pairs],
        "config": config.model_dump(mode="json"),
        "environment": software(device),
    }
    write_json(folder.report_file, data)
    write_text(folder.report_page, render(data))
    return folder.report_page


def _change(change: Change) -> dict[str, Any]:
    return {**asdict(change), "gain": change.gain, "clear": change.clear}


def software(device: str = "") -> dict[str, str]:
    """The versions and the machine: what one needs to reproduce the run."""
    return {
        "palestra": installed_version("palestra") or "not installed",
        "Python": platform.python_version(),
        "torch": installed_version("torch") or "not installed",
        "transformers": installed_version("transformers") or "not installed",
        "system": platform.platform(terse=True),
        "machine": platform.machine(),
        "device": device or f"CPU, {os.cpu_count()} cores",
    }


def _transcript(rollout: Rollout) -> dict[str, Any]:
    return {
        "passed": rollout.passed,
        "stop": rollout.stop,
        "error": rollout.error,
        "messages": [{k: v for k, v in asdict(m).items() if k != "reasoning"} for m in rollout.messages],
        "scores": {name: asdict(score) for name, score in rollout.scores.items()},
    }
