"""The ten tools by which an agent drives trainings: one table, from which Python, MCP and HTTP are made."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, Literal

from palestra.agents.tools.tool import Tool, function_tool
from palestra.core.run_folder import RunFolder
from palestra.envs.discover import discover
from palestra.evals.findings import recorded_findings
from palestra.extras.agent_tools.answers import Refusal, page, require_page, short
from palestra.extras.agent_tools.config_fields import TRACKING_NAME, Progress, describe
from palestra.extras.agent_tools.inference import InferenceTest
from palestra.runs.index import PARTS
from palestra.runs.manager import Run
from palestra.runs.tracking import needs_wandb_key

Data = Mapping[str, Any]
JsonValue = str | int | float | bool | list[Any] | dict[str, Any] | None
Effect = Literal["reads", "edits", "starts", "stops"]
MINIMUM_PYTHON = (3, 11)
_BACKEND_KEYS = {"local": (), "tinker": ("TINKER_API_KEY",)}
_HINTS = {
    "TINKER_API_KEY": "make one in the Tinker console",
    "WANDB_API_KEY": "make one at wandb.ai/authorize, set WANDB_MODE=offline, or leave wandb out of track.report_to",
}
_METRICS = ("step", "reward_mean", "percent_correct", "eval_percent_correct", "loss")
_STOP_WAIT_S = 60.0


@dataclass(frozen=True)
class Call:
    """One call of a tool: its session, where its progress is reported, and whether it was cancelled."""

    tools: Any  # the RlTools of the client, which calls it
    progress: Progress
    cancelled: threading.Event


def rl_list_environments(call: Call, contains: str = "", limit: int = 30, offset: int = 0) -> Data:
    """List the environments that a model can be trained on, those in your own files first. Start here.

    Args:
        contains: Only names and descriptions with this text.
        limit: Environments to list at once, at most 200.
        offset: How many to leave out: next_offset of the answer before.
    """
    found = discover()
    ordered = sorted(found.environments, key=lambda e: (e.origin == "built-in") + bool(e.preset))
    shown, about = page(ordered, limit, offset, lambda e: f"{e.name} {e.description}", contains)
    rows = [
        {"name": e.name, "class_name": e.class_name, "file_path": e.file_path, "description": short(e.description)}
        for e in shown
    ]
    tips = [
        "rl_select_environment(name) selects one and loads its settings",
        "read the file at file_path to see what an environment asks and how it scores",
        "files in ./environments and in the folders of PALESTRA_ENV_PATH are found too",
    ]
    errors = {str(path): reason for path, reason in found.errors.items()}
    return {"environments": rows, **about, "tips": tips, **({"errors": errors} if errors else {})}


def rl_select_environment(call: Call, name: str) -> Data:
    """Select the environment to train on, and load its settings with its own values. Earlier edits are dropped.

    The first environment written for Atropos takes minutes: what it needs is installed. If you give up waiting, the
    installation continues; select it again later.

    Args:
        name: A name from rl_list_environments.
    """
    pending = call.tools.select(name, call.progress)
    return {
        "message": f"{pending.env.name} is selected. rl_get_current_config shows its settings, "
        "rl_start_training starts a training",
        "environment": pending.env.name,
        "file_path": pending.env.file_path,
        TRACKING_NAME: pending.edited[TRACKING_NAME],
    }


def rl_get_current_config(call: Call, contains: str = "", limit: int = 30, offset: int = 0) -> Data:
    """Show the settings of the selected environment and of its training: which may be edited, which are locked. The
    environment's own and the usual ones come first.

    Args:
        contains: Only names with this text, such as "train." or "lora".
        limit: Settings to list at once, at most 200.
        offset: How many to leave out: next_offset of the answer before.
    """
    pending = call.tools.pending
    shown, about = page(pending.open_fields(), limit, offset, lambda f: f.name, contains)
    configurable = [
        {name: getattr(f, name) for name in ("name", "type", "default", "description")}
        | {"current_value": pending.value(f.name)}
        for f in shown
    ]
    locked = [row for row in pending.locked_rows() if offset == 0 and contains.lower() in row["name"].lower()]
    return {
        "environment": pending.env.name,
        "configurable_fields": configurable,
        **about,
        "locked_fields": locked,
        "tip": "rl_edit_config(field, value) changes one field; locked ones are set by the site and cannot be changed",
    }


def rl_edit_config(call: Call, field: str, value: JsonValue) -> Data:
    """Change one setting of the training.

    Args:
        field: A name from configurable_fields of rl_get_current_config.
        value: The new value, of the field's type.
    """
    pending = call.tools.edit(field, value)
    name = pending.own_name(field)
    message = f"{name} is changed" + (f" ({field} is another name of it)" if name != field else "")
    return {"message": message, "field": name, "value": pending.value(name), "config": pending.config()}


def rl_start_training(call: Call) -> Data:
    """Start a training on the selected environment with the current settings. It goes on when you disconnect."""
    tools, pending = call.tools, call.tools.pending
    trackers = {*pending.value("track.report_to"), *(["wandb"] if pending.env_settings().get("use_wandb") else [])}
    missing = get_missing_keys(pending.site.profile, trackers)
    if missing:
        hints = "; ".join(f"{key}: {_HINTS[key]}" for key in missing)
        raise Refusal(f"{' and '.join(missing)} must be set in this server's environment ({hints})", missing=missing)
    describe(pending.env, pending.env_settings(), tools.site.limits)  # they must fit together, too
    run = tools.manager.start(pending.request(), max_active=tools.site.limits.active_runs)
    return {
        "run_id": run.run_id,
        "status": "starting" if run.state in ("pending", "starting", "running") else run.state,
        "environment": pending.env.name,
        "config": pending.config(),
        "config_path": RunFolder(run.folder).request_file,
        "logs": _logs(run),
        "wandb_project": pending.value("track.project"),
        "wandb_run_name": pending.value(TRACKING_NAME),
        "wandb_url": None,
        "tip": f"rl_check_status({run.run_id!r}) tells how it is doing; it goes on when you disconnect",
        **({"note": run.reason} if run.reason else {}),
    }


def rl_check_status(call: Call, run_id: str) -> Data:
    """Look how a training is doing. Trainings take long: look seldom; a look too soon tells only the state.

    Args:
        run_id: The id that rl_start_training gave, or one from rl_list_runs.
    """
    run = call.tools.run(run_id)
    if wait_s := call.tools.seconds_to_wait(run):
        return {
            **_header(run),
            "rate_limited": True,
            "message": f"its state is the same as at your last look; look again in {wait_s / 60:.0f} minutes. "
            "A change of state is told at once",
            "minutes_to_wait": round(wait_s / 60, 1),
            "next_check_in_seconds": math.ceil(wait_s),
        }
    # a run is one process, unless its environment has one of its own
    elsewhere = "in the trainer's process" if "trainer" in run.processes else "not started"
    return {
        **_about(run),
        "processes": {part: run.processes.get(part, elsewhere) for part in PARTS},
        "metrics": {name: run.progress.get(name) for name in _METRICS},
        "logs": _logs(run),
        **({"note": run.reason} if run.reason and run.state != "failed" else {}),
    }


def rl_stop_training(call: Call, run_id: str) -> Data:
    """Stop a training. What it has learned so far is saved in a checkpoint.

    Args:
        run_id: The id that rl_start_training gave, or one from rl_list_runs.
    """
    run = call.tools.run(run_id)
    if run.is_active:
        run = call.tools.manager.stop(run.run_id, wait_s=_STOP_WAIT_S)
    message = f"the run is {run.state}" + (f": {run.reason}" if run.reason else "")
    return {**_header(run), "message": message, "folder": run.folder, "processes": dict(run.processes)}


def rl_get_results(call: Call, run_id: str) -> Data:
    """Get the metrics of a training, their history, and the path of the trained weights.

    Args:
        run_id: The id that rl_start_training gave, or one from rl_list_runs.
    """
    run = call.tools.run(run_id)
    results = call.tools.manager.results(run.run_id)
    path, checkpoint = results["model_path"], results["checkpoint"]
    if path:
        tip = f"load the weights with palestra.models.loading.load_model({str(path)!r}), or serve them: "
        tip += f"palestra serve {path}"
    elif checkpoint is None:
        tip = "a run has weights from its first checkpoint on; checkpoint.every says when that is"
    else:
        tip = f"checkpoint_path loads like any model: palestra serve {checkpoint}; the run goes on from it with: "
        tip += f"palestra runs resume {run.run_id}"
    return {
        **_about(run),
        **{name: results[name] for name in ("final_metrics", "history", "report_path")},
        "report": _rates(results["report"]),
        "weights_path": path,
        "checkpoint_path": checkpoint,
        "tip": tip,
    }


def rl_list_runs(call: Call, limit: int = 50, offset: int = 0) -> Data:
    """List all trainings with their states, newest first, also those of earlier sessions and other clients.

    Args:
        limit: Trainings to list at once, at most 200.
        offset: How many of the newest to leave out: next_offset of the answer before.
    """
    require_page(limit, offset)
    runs, total = call.tools.manager.page(limit, offset)
    rows = [
        {**_header(run), **_tracking(run), "name": run.name, "metrics": dict(run.progress), "folder": run.folder}
        for run in runs
    ]
    following = offset + len(rows)
    return {"runs": rows, "count": total, **({"next_offset": following} if following < total else {})}


def rl_test_inference(call: Call, num_steps: int = 3, group_size: int = 16, models: list[str] | None = None) -> Data:
    """Let models attempt problems of the selected environment, without training, to see whether it can be learned.

    Args:
        num_steps: Problems that each model attempts.
        group_size: Attempts at each problem.
        models: Names at the endpoint, local ones (palestra/tiny, a folder, local:HUB_ID), or NAME@URL for a server
            on this machine. Default: a few small models where OPENROUTER_API_KEY is set, else the model to train.
    """
    tools = call.tools
    test = InferenceTest(tools.pending, num_steps, group_size, tools.manager.home, call.progress, call.cancelled)
    if not tools.testing.acquire(blocking=False):
        raise Refusal("a test is running already; wait for its answer, then ask for another")
    try:
        return test.run(models)
    finally:
        tools.testing.release()


EFFECTS: Mapping[Callable[..., Data], Effect] = {
    rl_list_environments: "reads",
    rl_select_environment: "edits",
    rl_get_current_config: "reads",
    rl_edit_config: "edits",
    rl_start_training: "starts",
    rl_check_status: "reads",
    rl_stop_training: "stops",
    rl_get_results: "reads",
    rl_list_runs: "reads",
    rl_test_inference: "starts",
}
# the schema is that of the bound function, which lacks the Call
_TOOLS = [replace(function_tool(MethodType(function, object())), fn=function) for function in EFFECTS]
TOOLS: Mapping[str, Tool] = {tool.name: tool for tool in _TOOLS}


def _header(run: Run) -> dict[str, Any]:
    """The fields that every answer about a run begins with."""
    minutes = round(max(0.0, (run.ended or time.time()) - run.started) / 60, 1) if run.started else 0.0
    return {
        "run_id": run.run_id,
        "status": run.state,
        "environment": run.environment,
        "minutes_running": minutes,
        "running_time_minutes": minutes,  # the same, as other tools call it
    }


def _about(run: Run) -> dict[str, Any]:
    """Also where it is tracked, what the model could do before, why little is learned, and why it failed."""
    folder = RunFolder(run.folder)
    capability = folder.record.get("capability") if folder.has_begun else None
    return {
        **_header(run),
        **_tracking(run),
        "capability": (capability or {}).get("text"),
        "findings": [str(finding) for finding in recorded_findings(folder, ended=not run.is_active)],
        **({"error": run.reason} if run.state == "failed" else {}),
    }


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


def check_rl_python_version() -> bool:
    """Whether this Python is new enough."""
    return sys.version_info[:2] >= MINIMUM_PYTHON


def check_rl_api_keys(backend: str = "local", trackers: Iterable[str] = ()) -> bool:
    """Whether every key that the backend and the trackers need is set."""
    return not get_missing_keys(backend, trackers)


def get_missing_keys(
    backend: str = "local", trackers: Iterable[str] = (), environ: Mapping[str, str] = os.environ
) -> list[str]:
    """The names of the keys that are needed and not set; W&B needs none offline, or after `wandb login`."""
    missing = [key for key in _BACKEND_KEYS[backend] if not environ.get(key)]
    return missing + (["WANDB_API_KEY"] if "wandb" in trackers and needs_wandb_key(environ) else [])
