"""Opens the trackers of a run: its files, and the services W&B, TensorBoard, MLflow and Trackio.

W&B and Trackio show transcripts, too; all rollouts are in rollouts.jsonl. Each library is imported when its service
starts.
"""

from __future__ import annotations

import json
import logging
import netrc
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

from palestra.core.config import RunConfig, flatten
from palestra.core.config_sections import TrackSection
from palestra.core.errors import MissingPackageError, PalestraError, ServiceError, SettingError
from palestra.core.files import append_jsonl, filter_jsonl, replacing, write_text
from palestra.core.group_codec import rollout_to_dict
from palestra.core.messages import prompt_length, show_call
from palestra.core.run_folder import TOKENS_NAME, RunFolder
from palestra.core.text import visible
from palestra.core.types import Array, Group, Rollout

log = logging.getLogger("palestra")

# Each call to a service that is down may take minutes to time out.
MAX_CONSECUTIVE_FAILURES = 3


class Tracker:
    """Takes metrics and rollouts, once a step, from the training loop. Subclasses override what they store."""

    def metrics(self, step: int, row: Mapping[str, float]) -> None: ...

    def rollouts(self, step: int, groups: Sequence[Group]) -> None: ...

    def tokens(self, step: int, table: Callable[[], Array]) -> None:
        """The columns that `train.update` computed for each token of the step; `table` may be called later."""

    def flush(self) -> None:
        """Wait until all of it is on disk."""

    def close(self) -> None: ...


class JsonlTracker(Tracker):
    """One line per step in metrics.jsonl, one line per rollout of every `rollouts_every`-th step in rollouts.jsonl.

    Rollouts and tokens are written in a thread: a step has hundreds, and the next one begins to sample meanwhile. What
    fails there is raised by `flush`, which the next step calls. `services` get the same metrics and rollouts.
    """

    def __init__(
        self,
        folder: RunFolder,
        resume_after: int | None = None,
        rollouts_every: int = 1,
        services: Sequence[Tracker] = (),
    ) -> None:
        self._metrics_file, self._rollouts_file, self._tokens = folder.metrics_file, folder.rollouts_file, folder.tokens
        self._rollouts_every = rollouts_every
        self._services = services
        self._thread = ThreadPoolExecutor(1, "palestra-records")
        self._written: list[Future[None]] = []
        if resume_after is not None:  # the steps after it are repeated
            for path in (folder.metrics_file, folder.rollouts_file):
                filter_jsonl(path, lambda row: isinstance(step := row.get("step"), int) and step <= resume_after)
            for step, path in folder.tokens_files().items():
                if step > resume_after:
                    path.unlink()

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        append_jsonl(self._metrics_file, [{"step": step, **row}])
        for service in self._services:
            service.metrics(step, row)

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        self.flush()
        if self._rollouts_every and step % self._rollouts_every == 0:
            rows = (
                {"step": step, "group": g, **rollout_to_dict(rollout)}
                for g, group in enumerate(groups)
                for rollout in group.rollouts
            )
            self._written.append(self._thread.submit(append_jsonl, self._rollouts_file, rows))
        for service in self._services:
            service.rollouts(step, groups)

    def tokens(self, step: int, table: Callable[[], Array]) -> None:
        def write() -> None:
            import numpy as np

            path = self._tokens / TOKENS_NAME.format(step)
            self._tokens.mkdir(exist_ok=True)
            with replacing(path) as partial, partial.open("wb") as file:
                np.save(file, table(), allow_pickle=False)

        self._written.append(self._thread.submit(write))

    def flush(self) -> None:
        written, self._written = self._written, []
        for part in written:
            part.result()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._thread.shutdown()
            for service in self._services:
                service.close()


class GuardedTracker(Tracker):
    """A service whose failure does not stop the run: the first is logged; after three in a row it is not called."""

    def __init__(self, name: str, service: Tracker) -> None:
        self._name = name
        self._service = service
        self._warned = False
        self._failures = 0

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        self._try(self._service.metrics, step, row)

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        self._try(self._service.rollouts, step, groups)

    def close(self) -> None:
        self._failures = 0  # closing is always tried
        self._try(self._service.close)

    def _try(self, call: Callable[..., None], *arguments: Any) -> None:
        if self._failures >= MAX_CONSECUTIVE_FAILURES:
            return
        try:
            call(*arguments)
            self._failures = 0
        except Exception as error:
            self._failures += 1
            if not self._warned:
                self._warned = True
                text = "%s failed (%s: %s); the run goes on, and metrics.jsonl has every number"
                log.warning(text, self._name, type(error).__name__, error)


COLUMNS = ["step", "problem", "reward", "passed", "stop", "sampled_tokens", "question", "transcript", "reasons"]
MAX_TRANSCRIPTS = 32
MAX_CELL_CHARS = 10_000  # of one cell
MAX_PARAMETER_CHARS = 6000  # MLflow's own limit
_MODES_WITHOUT_KEY = ("offline", "dryrun", "disabled")


def open_trackers(config: RunConfig, folder: RunFolder, record: Mapping[str, Any], resume_after: int | None) -> Tracker:
    """The files of the run folder, and every service in `track.report_to`.

    `record` describes the run (agent, tools, instructions). With `resume_after`, the run continues after that
    step. A service that cannot start raises here, before any training.
    """
    settings = {**config.model_dump(mode="json"), "run": dict(record)}
    services: list[Tracker] = []
    tracker = JsonlTracker(folder, resume_after, config.track.rollouts_every, services)
    try:
        for name in dict.fromkeys(config.track.report_to):
            services.append(GuardedTracker(name, _start(name, folder, config.track, settings, resume_after)))
    except BaseException:
        tracker.close()
        raise
    return tracker


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
            case _:
                return TrackioService(run_name, track, settings, resumed)
    except ModuleNotFoundError as error:
        raise _not_installed(name, error.name) from error
    except PalestraError:
        raise
    except Exception as error:
        raise ServiceError(
            f"{name} could not be started ({type(error).__name__}: {error}); fix that, or leave it out of report_to"
        ) from error


class WandbService(Tracker):
    """One W&B run, online or offline (WANDB_MODE=offline) in the run folder; a resumed training continues it."""

    def __init__(
        self, folder: RunFolder, name: str, track: TrackSection, settings: Mapping[str, Any], resumed: bool
    ) -> None:
        import wandb

        check_wandb_key()
        self._track = track
        if not (resumed and folder.wandb_id_file.exists()):
            write_text(folder.wandb_id_file, uuid.uuid4().hex[:12])
        self._run = wandb.init(
            project=track.project,
            entity=track.entity,
            name=name,
            dir=folder.path,
            id=folder.wandb_id_file.read_text(),
            resume="allow",
            config=dict(settings),
            settings=wandb.Settings(console="off"),  # capturing stdout would break the progress bar
        )
        if self._run.url:  # not when offline
            write_text(folder.wandb_url_file, str(self._run.url))
        # Our own step is the x axis: W&B's step only increases, but a resumed run may repeat steps.
        self._run.define_metric("*", step_metric="step")

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        self._run.log({"step": step, **row})

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        if self._track.shows_transcripts(step):
            import wandb

            table = wandb.Table(columns=COLUMNS, data=transcript_rows(step, groups))
            self._run.log({"step": step, "transcripts": table})

    def close(self) -> None:
        self._run.finish()


def check_wandb_key() -> None:
    """Raise where W&B would ask for a key."""
    if needs_wandb_key():
        raise SettingError(
            "report_to 'wandb' needs WANDB_API_KEY, which is not set; set it, run `wandb login`, "
            "or set WANDB_MODE=offline to keep the run on this machine"
        )


def needs_wandb_key(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether W&B would ask for a key: it is online, and finds none in the variable or stored by `wandb login`."""
    if environ.get("WANDB_MODE", "online") in _MODES_WITHOUT_KEY or environ.get("WANDB_API_KEY"):
        return False
    host = urlsplit(environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(environ.get("NETRC")).authenticators(host) is None
    except (OSError, netrc.NetrcParseError):
        return True


class TensorBoardService(Tracker):
    """Event files in the run folder, one series of scalars per metric: `tensorboard --logdir RUN/tensorboard`."""

    def __init__(self, folder: RunFolder, settings: Mapping[str, Any], resume_after: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Readers ignore events from purge_step on: a resumed run repeats those steps.
        purge_step = None if resume_after is None else resume_after + 1
        self._writer = SummaryWriter(folder.tensorboard, purge_step=purge_step)
        if resume_after is None:
            self._writer.add_text("config", f"```json\n{json.dumps(settings, indent=1, default=str)}\n```")

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # so that a killed run loses nothing

    def close(self) -> None:
        self._writer.close()


class MLflowService(Tracker):
    """One MLflow run, at MLFLOW_TRACKING_URI or in a database in the run folder; a resumed training continues it."""

    def __init__(self, folder: RunFolder, project: str, name: str, settings: Mapping[str, Any], resumed: bool) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(uri or f"sqlite:///{folder.mlflow_database.resolve()}")
        if resumed and folder.mlflow_id_file.exists():
            self._run_id = folder.mlflow_id_file.read_text()
            self._client.update_run(self._run_id, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(project)
        artifacts = None if uri else folder.mlflow_artifacts.resolve().as_uri()
        experiment = found.experiment_id if found else self._client.create_experiment(project, artifacts)
        self._run_id = self._client.create_run(experiment, run_name=name).info.run_id
        write_text(folder.mlflow_id_file, self._run_id)
        flat = flatten(dict(settings)).items()
        params = [Param(_mlflow_name(key), str(value)[:MAX_PARAMETER_CHARS]) for key, value in flat]
        self._client.log_batch(self._run_id, params=params)

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._client.log_batch(self._run_id, [Metric(_mlflow_name(k), float(v), now_ms, step) for k, v in row.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _mlflow_name(name: str) -> str:
    """MLflow refuses characters that the name of a measure may have."""
    return re.sub(r"[^\w\-./ :]", "_", name)


class TrackioService(Tracker):
    """One Trackio run, local or in the Space of TRACKIO_SPACE_ID; a resumed training continues the run of its name."""

    def __init__(self, name: str, track: TrackSection, settings: Mapping[str, Any], resumed: bool) -> None:
        import trackio

        self._track = track
        self._run = trackio.init(
            track.project, name=name, config=dict(settings), resume="allow" if resumed else "never", embed=False
        )

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        self._run.log(dict(row), step=step)

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        if self._track.shows_transcripts(step):
            import trackio

            self._run.log({"transcripts": trackio.Table(COLUMNS, transcript_rows(step, groups))}, step=step)

    def close(self) -> None:
        self._run.finish()


def transcript_rows(step: int, groups: Sequence[Group]) -> list[list[Any]]:
    """The first rollouts of a step, whole groups together, best reward first in each."""
    ordered = (r for group in groups for r in sorted(group.rollouts, key=lambda r: r.reward, reverse=True))
    return [_row(step, rollout) for rollout in islice(ordered, MAX_TRANSCRIPTS)]


def _row(step: int, rollout: Rollout) -> list[Any]:
    first = prompt_length(rollout.messages)
    question = next((message.text for message in reversed(rollout.messages[:first]) if message.role == "user"), "")
    said = []
    for message in rollout.messages[first:]:
        said += [f"{message.role}: {message.text}", *(f"  calls {show_call(call)}" for call in message.tool_calls)]
    reasons = [f"{name}: {score.value:g} {score.reason}".strip() for name, score in rollout.scores.items()]
    texts = (question, "\n".join(said), "\n".join(reasons) or rollout.error or "")
    return [
        step,
        rollout.problem_id,
        float(rollout.reward),
        rollout.passed,
        rollout.stop,
        rollout.sampled_tokens,
        *(visible(text)[:MAX_CELL_CHARS] for text in texts),
    ]
