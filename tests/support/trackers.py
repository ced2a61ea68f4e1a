"""Trackers that call nobody, and a few steps written to them."""

from pathlib import Path

import pytest

from palestra.core.config import RunConfig
from palestra.core.run_folder import RunFolder
from palestra.core.types import Group, Message, Rollout, Score, ToolCall
from palestra.runs.tracking import Tracker, open_trackers


def silence_services(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """No tracker calls home, finds a key or writes outside the folder."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID"):
        patch.delenv(name, raising=False)
    patch.setenv("HOME", str(folder))
    patch.setenv("NETRC", str(folder / "no-netrc"))
    patch.setenv("WANDB_ERROR_REPORTING", "false")
    patch.setenv("WANDB_SILENT", "true")
    patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    patch.setenv("TRACKIO_DISABLE_TELEMETRY", "1")


def attempts() -> list[Group]:
    """A group of two attempts at one problem: one that called a tool and passed, and one that did not."""
    call = ToolCall("call_0", "add", {"a": 1, "b": 2})
    opening = (Message("system", "Add."), Message("user", "What is 1 + 2?"))
    good = (Message("assistant", "", (call,)), Message("tool", "3", (), "call_0"), Message("assistant", "It is 3."))
    passed, failed = Score(1.0, True, "right"), Score(0.0, False, "not 3")
    rollouts = [
        Rollout("p1", (), (*opening, Message("assistant", "It is 4.")), "answered", scores={"right": failed}),
        Rollout("p1", (), (*opening, *good), "answered", scores={"right": passed}, reward=1.0),
    ]
    return [Group("p1", tuple(rollouts))]


def track(folder: Path, report_to: list[str], steps: range, resume_after: int | None) -> Tracker:
    """Open trackers on a folder, write the loss of some steps (half the step), close."""
    folder.mkdir(exist_ok=True)
    config = RunConfig.build({"track": {"report_to": report_to, "project": "gym"}})
    trackers = open_trackers(config, RunFolder(folder), {"agent": "calculator"}, resume_after)
    for step in steps:
        trackers.metrics(step, {"loss": step / 2, "reward_mean": 0.25, "pass_rate/is exact?": 1.0})
    trackers.close()
    return trackers
