"""The report of a run: report.json for programs, report.html for people."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from palestra.core.files import write_json, write_text
from palestra.core.types import Rollout
from palestra.evals.report import compare, pick_transcripts
from palestra.faces.report_page import render
from palestra.result import GRPOTrainingResult


def write_report(result: GRPOTrainingResult) -> Path:
    """Write report.json and report.html into the run folder; the page's path."""
    data = report_data(result)
    folder = result.run.path
    write_json(folder / "report.json", data)
    write_text(folder / "report.html", render(data))
    return folder / "report.html"


def report_data(result: GRPOTrainingResult) -> dict[str, Any]:
    """All that the page shows, as plain data."""
    record, config = result.run.record, result.run.config
    return {
        "agent": result.agent.name,
        "model": config.model.name,
        "run": result.run.path.name,
        "created": record.get("created"),
        "source": record.get("source"),
        "seed": config.seed,
        "seconds": result.outcome.seconds,
        "instructions": result.instructions,
        "tools": [tool.name for tool in result.tools],
        **result.report(),
        "changes": [
            {**asdict(change), "gain": change.gain, "clear": change.clear}
            for change in compare(result.before, result.after)
        ],
        "metrics": result.metrics,
        "transcripts": [
            {"before": _transcript(before), "after": _transcript(after)}
            for before, after in pick_transcripts(result.before.rollouts, result.after.rollouts)
        ],
        "config": config.model_dump(mode="json"),
        "environment": environment(),
    }


def environment() -> dict[str, str]:
    """Where the run was made: what one needs to make it again."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    return {
        "palestra": _version("palestra"),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "system": platform.platform(terse=True),
        "machine": platform.machine(),
        "device": device,
    }


def _transcript(rollout: Rollout) -> dict[str, Any]:
    return {
        "passed": rollout.passed,
        "stop": rollout.stop,
        "error": rollout.error,
        "messages": [asdict(message) for message in rollout.messages],
        "scores": {name: asdict(score) for name, score in rollout.scores.items()},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
