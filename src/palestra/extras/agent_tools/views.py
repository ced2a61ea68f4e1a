"""The answers of the tools: runs, environments and settings as data."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from palestra.core.run_folder import RunFolder
from palestra.envs.discover import Discovery
from palestra.evals.findings import recorded_findings
from palestra.extras.agent_tools.answers import MAX_LISTED, page, short
from palestra.extras.agent_tools.pending_run import TRACKING_NAME, PendingRunConfig
from palestra.runs.index import PARTS
from palestra.runs.manager import Run

_METRICS = ("step", "reward_mean", "percent_correct", "eval_percent_correct", "loss")
Data = Mapping[str, Any]


def environments(discovery: Discovery, contains: str = "", limit: int = MAX_LISTED, offset: int = 0) -> Data:
    ordered = sorted(discovery.environments, key=lambda e: (e.origin == "built-in") + bool(e.preset))
    shown, about = page(ordered, limit, offset, lambda e: f"{e.name} {e.description}", contains)
    rows = [
        {"name": e.name, "class_name": e.class_name, "file_path": e.file_path, "description": short(e.description)}
        for e in shown
    ]
    answer: dict[str, Any] = {
        "environments": rows,
        **about,
        "tips": [
            "rl_select_environment(name) selects one and loads its settings",
            "read the file at file_path to see what an environment asks and how it scores",
            "files in ./environments and in the folders of PALESTRA_ENV_PATH are found too",
        ],
    }
    if discovery.errors:
        answer["errors"] = {str(path): reason for path, reason in discovery.errors.items()}
    return answer


def config(draft: PendingRunConfig, contains: str = "", limit: int = MAX_LISTED, offset: int = 0) -> Data:
    shown, about = page(draft.open_fields(), limit, offset, lambda f: f.name, contains)
    configurable = [
        {
            "name": f.name,
            "type": f.type,
            "default": f.default,
            "description": f.description,
            "current_value": draft.value(f.name),
        }
        for f in shown
    ]
    locked = [
        {
            "name": lock.full_name,
            "type": lock.type,
            "default": draft.locked_value(lock),
            "description": lock.description,
            "locked_value": draft.locked_value(lock),
        }
        for lock in draft.shown_locks()
        if offset == 0 and contains.lower() in lock.full_name.lower()
    ]
    return {
        "environment": draft.env.name,
        "configurable_fields": configurable,
        **about,
        "locked_fields": locked,
        "tip": "rl_edit_config(field, value) changes one field; locked ones are set by the site and cannot be changed",
    }


def started(run: Run, draft: PendingRunConfig) -> Data:
    return {
        "run_id": run.run_id,
        "status": "starting" if run.state in ("pending", "starting", "running") else run.state,
        "environment": draft.env.name,
        "config": draft.config(),
        "config_path": RunFolder(run.folder).request_file,
        "logs": _logs(run),
        "wandb_project": draft.value("track.project"),
        "wandb_run_name": draft.value(TRACKING_NAME),
        "wandb_url": None,
        "tip": f"rl_check_status({run.run_id!r}) tells how it is doing; it goes on when you disconnect",
        **({"note": run.reason} if run.reason else {}),
    }


def status(run: Run) -> Data:
    # a run is one process, unless its environment has one of its own
    elsewhere = "in the trainer's process" if "trainer" in run.processes else "not started"
    return {
        **header(run),
        **_tracking(run),
        "processes": {part: run.processes.get(part, elsewhere) for part in PARTS},
        "metrics": {name: run.progress.get(name) for name in _METRICS},
        "capability": _capability(run),
        "findings": _findings(run),
        "logs": _logs(run),
        **({"error": run.reason} if run.state == "failed" else {"note": run.reason} if run.reason else {}),
    }


def results(run: Run, data: Data) -> Data:
    path, checkpoint = data.get("model_path"), data.get("checkpoint")
    return {
        **header(run),
        **_tracking(run),
        "final_metrics": data.get("final_metrics"),
        "history": data.get("history"),
        "capability": _capability(run),
        "findings": _findings(run),
        "report": _rates(data.get("report")),
        "report_path": data.get("report_path"),
        "weights_path": path,
        "checkpoint_path": checkpoint,
        "tip": f"load the weights with palestra.models.loading.load_model({str(path)!r}), or serve them: "
        f"palestra serve {path}"
        if path
        else "a run has weights from its first checkpoint on; checkpoint.every says when that is"
        if checkpoint is None
        else f"checkpoint_path loads like any model: palestra serve {checkpoint}; the run goes on from it with: "
        f"palestra runs resume {run.run_id}",
        **({"error": run.reason} if run.state == "failed" else {}),
    }


def runs(page_runs: Sequence[Run], offset: int, total: int) -> Data:
    rows = [
        {**header(run), **_tracking(run), "name": run.name, "metrics": dict(run.progress), "folder": run.folder}
        for run in page_runs
    ]
    following = offset + len(rows)
    return {"runs": rows, "count": total, **({"next_offset": following} if following < total else {})}


def header(run: Run) -> dict[str, Any]:
    """The fields that every answer about a run begins with."""
    until = run.ended or time.time()
    minutes = round(max(0.0, until - run.started) / 60, 1) if run.started else 0.0
    return {
        "run_id": run.run_id,
        "status": run.state,
        "environment": run.environment,
        "minutes_running": minutes,
        "running_time_minutes": minutes,  # the same, as other tools call it
    }


def _findings(run: Run) -> list[str]:
    """Reasons why little is learned, each with a remedy and an example."""
    return [str(finding) for finding in recorded_findings(RunFolder(run.folder), ended=not run.is_active)]


def _capability(run: Run) -> str | None:
    """The model's capability before training; None until the first step."""
    folder = RunFolder(run.folder)
    return (folder.record.get("capability") or {}).get("text") if folder.has_begun else None


def _tracking(run: Run) -> dict[str, Any]:
    return {f"wandb_{name}": value for name, value in RunFolder(run.folder).tracking().items()}


def _logs(run: Run) -> dict[str, Any]:
    return {part: run.logs.get(part, run.logs.get("trainer")) for part in PARTS}


def _rates(report: Any) -> Any:
    """Pass rates before and after, and of which split: held_out, or train where none was. The rest is in the file."""
    if not isinstance(report, Mapping):
        return None
    scored = {when: report[when] for when in ("before", "after") if isinstance(report.get(when), Mapping)}
    rates = {when: evaluation.get("pass_rate") for when, evaluation in scored.items()}
    splits = [evaluation.get("split", "held_out") for evaluation in scored.values()]
    return rates | ({"split": splits[-1]} if splits else {})
