"""Builds the trackers of a run from its config."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from palestra.core.config import RunConfig
from palestra.core.config_sections import TrackSection
from palestra.core.errors import MissingPackageError, PalestraError, ServiceError, SettingError
from palestra.core.run_folder import RunFolder
from palestra.runs.tracking.base import GuardedTracker, JsonlTracker, Tracker, Trackers
from palestra.runs.tracking.services import (
    MLflowService,
    TensorBoardService,
    TrackioService,
    WandbService,
    check_wandb_key,
)


def open_trackers(
    config: RunConfig, folder: RunFolder, record: Mapping[str, Any], resume_after: int | None
) -> Trackers:
    """The files of the run folder, and every service in `track.report_to`.

    `record` describes the run (agent, tools, instructions). With `resume_after`, the run continues after that
    step. A service that cannot start raises here, before any training.
    """
    settings = {**config.model_dump(mode="json"), "run": dict(record)}
    opened: list[Tracker] = [JsonlTracker(folder, resume_after, config.track.rollouts_every)]
    try:
        for name in dict.fromkeys(config.track.report_to):
            opened.append(GuardedTracker(name, _start(name, folder, config.track, settings, resume_after)))
    except BaseException:
        Trackers(opened).close()
        raise
    return Trackers(opened)


def check_trackers(track: TrackSection) -> None:
    """Raise for a service that cannot start, before a model is loaded."""
    for name in track.report_to:
        if find_spec(name) is None:
            raise _not_installed(name, name)
        if name == "wandb":
            check_wandb_key()


def _not_installed(name: str, package: str | None) -> PalestraError:
    return MissingPackageError(
        f"report_to {name!r} needs a package that is not installed ({package}); pip install 'palestra[{name}]'"
    )


def _start(
    name: str, folder: RunFolder, track: TrackSection, settings: dict[str, Any], resume_after: int | None
) -> Tracker:
    run_name, resumed = track.run_name or folder.path.name, resume_after is not None
    try:
        match name:
            case "wandb":
                return WandbService(folder, run_name, track, settings, resumed)
            case "tensorboard":
                return TensorBoardService(folder, settings, resume_after)
            case "mlflow":
                return MLflowService(folder, track.project, run_name, settings, resumed)
            case "trackio":
                return TrackioService(run_name, track, settings, resumed)
    except ModuleNotFoundError as error:
        raise _not_installed(name, error.name) from error
    except PalestraError:
        raise
    except Exception as error:
        raise ServiceError(
            f"{name} could not be started ({type(error).__name__}: {error}); fix that, or leave it out of report_to"
        ) from error
    raise SettingError(f"unknown tracker {name!r}; expected wandb, tensorboard, mlflow or trackio")
