"""What is kept of a client's training: a run like any other, and the checkpoints in its folder.

A run has a folder, a row in the index, metrics and rollouts for each step. tinker:// paths name what clients have
saved, so they survive restarts.

>>> str(TinkerPath.parse("tinker://s1:train:0/weights/step-10"))
'tinker://s1:train:0/weights/step-10'
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from starlette.background import BackgroundTask
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response

from palestra.core.config import RunConfig
from palestra.core.errors import InputError, PalestraError, StateError, StorageError
from palestra.core.files import MANIFEST, folder_size, verify_folder, write_folder, write_json
from palestra.core.run_folder import RunFolder
from palestra.core.types import Array, Group, Message, Rollout, Turn
from palestra.core.weights import saved_tensors
from palestra.extras.tinker.server import requests as bodies
from palestra.extras.tinker.server.base_model import AdapterSpec, BaseModel
from palestra.extras.tinker.server.futures import NotFound
from palestra.extras.tinker.server.messages import Datum
from palestra.extras.tinker.server.requests import Adam
from palestra.extras.tinker.server.training_model import Outputs
from palestra.runs.index import listed
from palestra.runs.tracking import open_trackers
from palestra.servers.web import refuse

ABOUT = "tinker.json"
EXPIRES = "expires.json"  # when, where it was changed later; not in the manifest, so that the rest is not written again
KINDS = {  # which request saves it, and what the SDK calls it
    "weights": ("save_weights", "training"),  # with the optimizer's state
    "sampler_weights": ("save_weights_for_sampler", "sampler"),
    "external_weights": ("save_weights_external", "external"),  # to be downloaded
}
_NAMED = 10  # checkpoints that a message names
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_URLS_S = 3600.0  # for which the URLs of files are said to be good
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TinkerPath:
    run_id: str
    kind: str
    name: str

    @classmethod
    def parse(cls, text: str) -> TinkerPath:
        parts = text.removeprefix("tinker://").split("/")
        if not text.startswith("tinker://") or len(parts) != 3 or parts[1] not in KINDS:
            raise InputError(f"{text!r} is no path of a checkpoint; they look like tinker://RUN/weights/NAME")
        return cls(parts[0], parts[1], checkpoint_name(parts[2]))

    def __str__(self) -> str:
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    path: TinkerPath
    folder: Path
    base_model: str
    spec: AdapterSpec
    created: float
    user_metadata: Mapping[str, str] | None = None
    expires: float | None = None  # seconds since 1970

    @property
    def files(self) -> dict[str, Path]:
        """The model's own by name, without the server's notes on them."""
        notes = (MANIFEST, ABOUT, EXPIRES)
        return {file.name: file for file in sorted(self.folder.iterdir()) if file.name not in notes}

    def tensors(self) -> dict[str, Any]:
        """The trained ones by the names that they have in a module with one adapter."""
        verify_folder(self.folder)
        tensors = saved_tensors(self.folder)
        if not tensors:
            raise StateError(f"{self.path} has no weights")
        return {name: t for name, t in tensors.items() if ".lora_" in name or not self.spec.rank}

    def described(self) -> Json:
        return {
            "checkpoint_id": f"{self.path.kind}/{self.path.name}", "checkpoint_type": KINDS[self.path.kind][1],
            "time": _time(self.created), "tinker_path": str(self.path), "size_bytes": folder_size(self.folder),
            "public": False, "user_metadata": self.user_metadata,
            "expires_at": None if self.expires is None else _time(self.expires),
        }  # fmt: skip


def checkpoint_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise InputError(f"{name!r} cannot name a checkpoint; use letters, digits, '_', '-' and '.', at most 128")
    return name


class Checkpoints:
    """The checkpoints in the run folders of one output folder."""

    def __init__(self, output_dir: Path) -> None:
        self._runs: dict[str, RunFolder] = {}
        for record in output_dir.glob("*/run.json"):
            run = RunFolder(record.parent)
            try:
                about = run.record.get("tinker")
            except (PalestraError, OSError):
                continue
            if isinstance(about, dict):
                self._runs[str(about.get("model_id"))] = run

    def add_run(self, run_id: str, run: RunFolder) -> None:
        self._runs[run_id] = run

    def run_ids(self) -> list[str]:
        """Newest first."""
        return sorted(self._runs, key=lambda i: self._runs[i].record_file.stat().st_mtime, reverse=True)

    def run(self, run_id: str) -> RunFolder:
        if run_id not in self._runs:
            raise NotFound(f"there is no training run {run_id!r} here")
        return self._runs[run_id]

    def save(
        self, path: TinkerPath, write: Callable[[Path], None], about: Json, *, ttl_s: int | None, overwrite: bool
    ) -> None:
        """`about` are the fields of the Checkpoint that only the caller knows."""
        folder, now = self._folder(path), time.time()
        if folder.exists() and not overwrite:
            raise StateError(f"{path} exists; give another name, or overwrite=True")

        def write_all(aside: Path) -> None:
            write(aside)
            write_json(aside / ABOUT, {**about, "created": now, "expires": now + ttl_s if ttl_s else None})

        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            write_folder(folder, write_all)
        except OSError as error:
            raise StorageError(f"{path} could not be written ({error.strerror}); earlier ones are whole") from error

    def find(self, path: TinkerPath, *, check: bool = False) -> Checkpoint:
        """A checkpoint that is there; with `check` its files are compared with their sums."""
        folder = self._folder(path)
        if not (folder / MANIFEST).is_file():
            known = [str(other) for other in self._paths(path.run_id)]
            more = f" and {len(known) - _NAMED} more" if len(known) > _NAMED else ""
            raise NotFound(f"there is no {path}; the run has {', '.join(known[:_NAMED]) or 'none'}{more}")
        if check:
            verify_folder(folder)
        about: Json = {}
        for file in (ABOUT, EXPIRES):
            if file == ABOUT or (folder / file).is_file():
                about |= json.loads((folder / file).read_text(encoding="utf-8"))
        return Checkpoint(path, folder, **{**about, "spec": AdapterSpec(**about["spec"])})

    def of_run(self, run_id: str) -> list[Checkpoint]:
        """Oldest first."""
        return sorted(map(self.find, self._paths(run_id)), key=lambda checkpoint: checkpoint.created)

    def delete(self, path: TinkerPath) -> None:
        shutil.rmtree(self.find(path).folder)

    def delete_expired(self) -> None:
        for run_id in list(self._runs):
            for checkpoint in self.of_run(run_id):
                if checkpoint.expires is not None and checkpoint.expires < time.time():
                    self.delete(checkpoint.path)

    def _paths(self, run_id: str) -> list[TinkerPath]:
        folders = [manifest.parent for manifest in self.run(run_id).tinker.glob(f"*/*/{MANIFEST}")]
        # without those that are being written or replaced
        real = [folder for folder in folders if folder.parent.name in KINDS and not folder.name.startswith(".")]
        return [TinkerPath(run_id, folder.parent.name, folder.name) for folder in real]

    def _folder(self, path: TinkerPath) -> Path:
        return self.run(path.run_id).tinker / path.kind / path.name

    # answers to requests, made in a thread

    def set_ttl(self, body: bodies.SetTtl, path: TinkerPath) -> Json:
        expires = time.time() + body.ttl_seconds if body.ttl_seconds else None
        write_json(self.find(path).folder / EXPIRES, {"expires": expires})
        return {}

    def weights_info(self, body: bodies.WeightsInfo) -> Json:
        checkpoint = self.find(TinkerPath.parse(body.tinker_path))
        trained = {name: getattr(checkpoint.spec, name) for name in ("train_unembed", "train_mlp", "train_attn")}
        # the SDK resumes from adapters alone; rank 0 is ours
        return {"base_model": checkpoint.base_model, "is_lora": True, "lora_rank": checkpoint.spec.rank, **trained}

    def get_run(self, run_id: str) -> Json:
        folder = self.run(run_id)
        about = folder.record["tinker"]
        last = {KINDS[saved.path.kind][1]: saved.described() for saved in self.of_run(run_id)}  # the newest of each
        changed = folder.metrics_file if folder.metrics_file.exists() else folder.record_file
        rank, metadata = int(about["spec"]["rank"]), about.get("user_metadata") or {}
        return {
            "training_run_id": run_id, "base_model": about["base_model"], "model_owner": "palestra",
            "is_lora": rank > 0, "lora_rank": rank, "corrupted": False,
            "last_request_time": _time(changed.stat().st_mtime), "last_checkpoint": last.get("training"),
            "last_sampler_checkpoint": last.get("sampler"),
            "user_metadata": {key: v if isinstance(v, str) else json.dumps(v) for key, v in metadata.items()},
        }  # fmt: skip

    def list_runs(self, page: slice) -> Json:
        ids = self.run_ids()
        return {"training_runs": list(map(self.get_run, ids[page])), "cursor": _cursor(page, len(ids))}

    def list_checkpoints(self, run_id: str) -> Json:
        return {"checkpoints": [saved.described() for saved in self.of_run(run_id)]}

    def list_all_checkpoints(self, page: slice) -> Json:
        found = [saved for run_id in self.run_ids() for saved in self.of_run(run_id)]
        found.sort(key=lambda saved: saved.created, reverse=True)
        return {"checkpoints": [saved.described() for saved in found[page]], "cursor": _cursor(page, len(found))}

    def archive(self, path: TinkerPath) -> Response:
        """The model's files as one tar file."""
        files = self.find(path, check=True).files
        packed = tempfile.NamedTemporaryFile(suffix=".tar")  # noqa: SIM115  # closed when it was sent
        with tarfile.open(packed.name, "w") as tar:
            for name, file in files.items():
                tar.add(file, arcname=name)
        end = BackgroundTask(packed.close)
        return FileResponse(packed.name, filename=f"{path.name}.tar", media_type="application/x-tar", background=end)

    def file_urls(self, url: str, path: TinkerPath) -> Json:
        here = url.removesuffix("/external_weights_urls")
        urls = {name: f"{here}/files/{name}" for name in self.find(path, check=True).files}
        return {"urls": urls, "expires": _time(time.time() + _URLS_S)}

    def file(self, path: TinkerPath, file: str) -> Response:
        files = self.find(path).files
        if file not in files:
            raise NotFound(f"{path} has no file {file!r}; it has {', '.join(files)}")
        return FileResponse(files[file])


def read_page(request: HttpRequest) -> slice:
    """The rows of a list that a request asks for."""
    try:
        offset, limit = (int(request.query_params.get(*pair)) for pair in (("offset", 0), ("limit", 20)))
    except ValueError:
        raise refuse(400, "offset and limit are whole numbers") from None
    if offset < 0 or not 1 <= limit <= 10_000:
        raise refuse(400, f"offset={offset} and limit={limit}; expected 0 or more, and 1 to 10000")
    return slice(offset, offset + limit)


def _cursor(page: slice, total: int) -> dict[str, int]:
    return {"offset": page.start, "limit": page.stop - page.start, "total_count": total}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


log = logging.getLogger("palestra")

RECORDED_ROWS = 1024  # of one step that are written to rollouts.jsonl


class TrainingRun:
    """The records of one model. A step begins with the first gradient after the last one.

    They are written in a thread of their own: no client waits for them. What cannot be written is logged.
    """

    def __init__(self, output_dir: Path, base: BaseModel, spec: AdapterSpec, name: str, about: dict[str, Any]) -> None:
        settings = {"model": {"name": base.name}, "lora": {"r": spec.rank, "alpha": spec.alpha}}
        config = RunConfig(output_dir=str(output_dir)).with_settings(settings)
        tinker = {**about, "base_model": base.name, "spec": asdict(spec)}
        self.folder = RunFolder.create(output_dir, name, config, {"tinker": tinker})
        self._tokenizer = base.tokenizer
        self._listing = contextlib.ExitStack()
        self._listing.enter_context(listed(self.folder.path))
        self._tracker = open_trackers(config, self.folder, self.folder.record, resume_after=None)
        self._began = time.perf_counter()
        self._step = 0
        self._writer = ThreadPoolExecutor(1, "tinker-records")
        self._begin_step()

    def computed(self, data: Sequence[Datum], loss_fn: str, outputs: Outputs, seconds: float) -> None:
        """Gradients of these rows were added."""
        self._writer.submit(self._logged, self._add_rows, data, loss_fn, outputs, seconds)

    def stepped(self, adam: Adam, grad_norm: float, seconds: float) -> None:
        """The weights have changed."""
        elapsed = time.perf_counter() - self._began
        self._writer.submit(self._logged, self._write_step, adam, grad_norm, seconds, elapsed)

    def close(self, *, completed: bool) -> None:
        """The run has ended; as stopped where its client did not end the session."""
        self._writer.shutdown()
        self._tracker.close()
        stopped = None if completed else KeyboardInterrupt()
        with contextlib.suppress(KeyboardInterrupt):
            self._listing.__exit__(None if stopped is None else type(stopped), stopped, None)

    def _logged(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except Exception:
            log.exception("records of %s could not be written", self.folder.path)

    def _add_rows(self, data: Sequence[Datum], loss_fn: str, outputs: Outputs, seconds: float) -> None:
        self._loss += outputs.loss
        self._rows += len(data)
        self._tokens += sum(len(datum.token_ids) for datum in data)
        self._seconds += seconds
        for datum, logprobs in zip(data, outputs.logprobs, strict=True):
            if len(self._rollouts) < RECORDED_ROWS and logprobs.ndim == 1:
                self._rollouts.append(_rollout(datum, loss_fn, logprobs, self._tokenizer, self._step))

    def _write_step(self, adam: Adam, grad_norm: float, seconds: float, elapsed: float) -> None:
        self._step += 1
        row = {
            "loss": self._loss, "grad_norm": grad_norm, "learning_rate": adam.learning_rate,
            "rows": float(self._rows), "tokens": float(self._tokens),
            "train_seconds": self._seconds + seconds, "elapsed_seconds": elapsed,
        }  # fmt: skip
        advantages = [float(r.reward) for r in self._rollouts if r.advantages is not None]
        if advantages:
            row["advantage_mean"] = float(np.mean(advantages))
        self._tracker.metrics(self._step, row)
        groups: dict[str, list[Rollout]] = {}  # rows of one prompt may come apart from each other
        for rollout in self._rollouts:
            groups.setdefault(rollout.problem_id, []).append(rollout)
        self._tracker.rollouts(self._step, [Group(name, tuple(rollouts)) for name, rollouts in groups.items()])
        self._begin_step()

    def _begin_step(self) -> None:
        self._loss = self._seconds = 0.0
        self._rows = self._tokens = 0
        self._rollouts: list[Rollout] = []


def _rollout(datum: Datum, loss_fn: str, computed: Array, tokenizer: Any, version: int) -> Rollout:
    """A row as a rollout: trained targets are the model's turns. Rewards do not travel; advantages stand for them."""
    inputs = datum.inputs
    targets = inputs["target_tokens"].values
    sampled = loss_fn != "cross_entropy"
    amount = inputs["advantages" if sampled else "weights"].values
    trained = (amount != 0) | (inputs["logprobs"].values != 0) if sampled else amount != 0
    behaviour = inputs["logprobs"].values if sampled else computed
    tokens = np.concatenate([datum.token_ids[:1], targets])
    mask = np.concatenate([[False], trained])
    values = np.concatenate([[0.0], behaviour])
    turns: list[Turn] = []
    messages: list[Message] = []
    changes = np.flatnonzero(mask[1:] != mask[:-1]) + 1
    for start, ids, logprobs in zip([0, *changes], np.split(tokens, changes), np.split(values, changes), strict=True):
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if mask[start]:
            turns.append(Turn("model", ids, logprobs, np.full(len(ids), version)))
            messages.append(Message("assistant", text))
        else:
            turns.append(Turn("environment" if turns else "template", ids))
            messages.append(Message("user", text))
    prompt = len(turns[0].token_ids) if turns[0].maker != "model" else 1
    return Rollout(
        problem_id=hashlib.blake2b(tokens[:prompt].tobytes(), digest_size=4).hexdigest(),
        turns=tuple(turns),
        messages=tuple(messages),
        stop="answered",
        reward=float(amount[trained].mean()) if sampled and trained.any() else 0.0,
        advantages=np.concatenate([[0.0], amount]).astype(np.float32) if sampled else None,
    )
