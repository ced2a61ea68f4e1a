"""The report of a run: report.json for programs, report.html for people."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from palestra.core.files import write_json, write_text
from palestra.core.machine import installed_version
from palestra.core.run_folder import RunFolder
from palestra.core.types import Rollout
from palestra.evals.evidence import Finding
from palestra.evals.report import Change, EvalReport, compare, compare_means, pick_transcripts
from palestra.evals.run_report.page import render

Metrics = Sequence[Mapping[str, float]]


def write_report(
    folder: RunFolder,
    before: EvalReport | None,
    after: EvalReport | None,
    metrics: Metrics,
    seconds: float,
    findings: Sequence[Finding] = (),
    *,
    device: str = "",
) -> Path:
    """Write report.json and report.html into the run folder, and return the path of the page.

    `before` and `after` are None if the environment cannot be evaluated here, as over the wire. What the run is
    (agent, instructions, tools) is read from run.json. `device` is the name of the GPU; empty for a CPU.
    """
    data = report_data(folder, before, after, metrics, seconds, findings, device)
    write_json(folder.report_file, data)
    write_text(folder.report_page, render(data))
    return folder.report_page


def report_data(
    folder: RunFolder,
    before: EvalReport | None,
    after: EvalReport | None,
    metrics: Metrics,
    seconds: float,
    findings: Sequence[Finding] = (),
    device: str = "",
) -> dict[str, Any]:
    """All that the page shows, for JSON. `changes` and `transcripts` are empty unless both evaluations were made."""
    record, config = folder.record, folder.config
    changes, means, pairs = [], [], []
    if before is not None and after is not None:
        changes, means = compare(before, after), compare_means(before, after)
        pairs = pick_transcripts(before.rollouts, after.rollouts)
    return {
        "agent": record.get("agent") or record.get("name"),
        "model": config.model.name,
        "run": folder.path.name,
        "created": record.get("created"),
        "source": record.get("source"),
        "seed": config.seed,
        "seconds": seconds,
        "instructions": str(record.get("instructions") or ""),
        "tools": [_tool_name(tool) for tool in record.get("tools") or ()],
        "before": before and before.to_dict(),
        "after": after and after.to_dict(),
        "capability": record.get("capability"),
        "findings": [finding.to_dict() for finding in findings],
        "changes": [_change(change) for change in changes],
        "mean_changes": [_change(change) for change in means],
        "metrics": list(metrics),
        "transcripts": [{"before": _transcript(first), "after": _transcript(second)} for first, second in pairs],
        "config": config.model_dump(mode="json"),
        "environment": software(device),
    }


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
        "messages": [asdict(message) for message in rollout.messages],
        "scores": {name: asdict(score) for name, score in rollout.scores.items()},
    }


def _tool_name(schema: Mapping[str, Any]) -> str:
    return str(schema.get("function", schema).get("name"))
