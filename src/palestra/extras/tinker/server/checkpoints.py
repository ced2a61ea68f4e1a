"""tinker:// paths: what clients have saved, in the folders of their runs, so they survive restarts.

>>> str(TinkerPath.parse("tinker://s1:train:0/weights/step-10"))
'tinker://s1:train:0/weights/step-10'
"""

from __future__ import annotations

import json
import re
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from starlette.background import BackgroundTask
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response

from palestra.core.errors import InputError, PalestraError, StateError, StorageError
from palestra.core.files import MANIFEST, folder_size, verify_folder, write_folder, write_json
from palestra.core.run_folder import RunFolder
from palestra.core.weights import saved_tensors
from palestra.extras.tinker.server import requests as bodies
from palestra.extras.tinker.server.base_model import AdapterSpec
from palestra.extras.tinker.server.futures import NotFound
from palestra.servers.web import refuse

ABOUT = "tinker.json"
EXPIRES = "expires.json"  # when, where it was changed later; not in the manifest, so that the rest is not written again
KINDS = ("weights", "sampler_weights", "external_weights")  # with the optimizer's state; without; to be downloaded
_NAMED = 10  # checkpoints that a message names
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


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
    def files(self) -> list[Path]:
        """The model's own, without the server's notes on them."""
        return sorted(file for file in self.folder.iterdir() if file.name not in (MANIFEST, ABOUT, EXPIRES))


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
        self,
        path: TinkerPath,
        base_model: str,
        spec: AdapterSpec,
        write: Callable[[Path], None],
        *,
        overwrite: bool = True,
        ttl_s: int | None = None,
        user_metadata: Mapping[str, str] | None = None,
    ) -> None:
        folder = self._folder(path)
        if folder.exists() and not overwrite:
            raise StateError(f"{path} exists; give another name, or overwrite=True")
        now = time.time()
        about = {
            "base_model": base_model, "spec": asdict(spec), "created": now,
            "user_metadata": dict(user_metadata) if user_metadata else None, "expires": now + ttl_s if ttl_s else None,
        }  # fmt: skip

        def write_all(aside: Path) -> None:
            write(aside)
            write_json(aside / ABOUT, about)

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
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        spec = AdapterSpec(**about["spec"])
        base, created = str(about["base_model"]), float(about["created"])
        if (folder / EXPIRES).is_file():
            about |= json.loads((folder / EXPIRES).read_text(encoding="utf-8"))
        return Checkpoint(path, folder, base, spec, created, about.get("user_metadata"), about.get("expires"))

    def of_run(self, run_id: str) -> Iterator[Checkpoint]:
        """Oldest first."""
        yield from sorted(map(self.find, self._paths(run_id)), key=lambda checkpoint: checkpoint.created)

    def set_ttl(self, path: TinkerPath, ttl_s: int | None) -> None:
        write_json(self.find(path).folder / EXPIRES, {"expires": time.time() + ttl_s if ttl_s else None})

    def delete(self, path: TinkerPath) -> None:
        shutil.rmtree(self.find(path).folder)

    def delete_expired(self) -> None:
        for run_id in list(self._runs):
            for checkpoint in list(self.of_run(run_id)):
                if checkpoint.expires is not None and checkpoint.expires < time.time():
                    self.delete(checkpoint.path)

    def _paths(self, run_id: str) -> list[TinkerPath]:
        folders = [manifest.parent for manifest in self.run(run_id).tinker.glob(f"*/*/{MANIFEST}")]
        # without those that are being written or replaced
        real = [folder for folder in folders if folder.parent.name in KINDS and not folder.name.startswith(".")]
        return [TinkerPath(run_id, folder.parent.name, folder.name) for folder in real]

    def _folder(self, path: TinkerPath) -> Path:
        return self.run(path.run_id).tinker / path.kind / path.name


def weights_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The trained tensors by the names that they have in a module with one adapter."""
    verify_folder(checkpoint.folder)
    tensors = saved_tensors(checkpoint.folder)
    if not tensors:
        raise StateError(f"{checkpoint.path} has no weights")
    return {name: t for name, t in tensors.items() if ".lora_" in name or not checkpoint.spec.rank}


_URLS_S = 3600.0  # for which the URLs of files are said to be good
T = TypeVar("T")
_TYPES = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


class CheckpointApi:
    """One method for each endpoint, called in a thread."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    def weights_info(self, request: HttpRequest, body: bodies.WeightsInfo) -> dict[str, Any]:
        checkpoint = self._checkpoints.find(TinkerPath.parse(body.tinker_path))
        trained = {name: getattr(checkpoint.spec, name) for name in ("train_unembed", "train_mlp", "train_attn")}
        # the SDK resumes from adapters alone; rank 0 is ours
        return {"base_model": checkpoint.base_model, "is_lora": True, "lora_rank": checkpoint.spec.rank, **trained}

    def list_runs(self, request: HttpRequest) -> dict[str, Any]:
        ids = self._checkpoints.run_ids()
        page, cursor = _page(request, ids)
        return {"training_runs": list(map(self._run, page)), "cursor": cursor}

    def get_run(self, request: HttpRequest) -> dict[str, Any]:
        return self._run(request.path_params["run_id"])

    def list_checkpoints(self, request: HttpRequest) -> dict[str, Any]:
        return {"checkpoints": self._checkpoints_of([request.path_params["run_id"]])}

    def list_all_checkpoints(self, request: HttpRequest) -> dict[str, Any]:
        newest_first = sorted(
            self._checkpoints_of(self._checkpoints.run_ids()),
            key=lambda row: str(row["time"]),
            reverse=True,
        )
        page, cursor = _page(request, newest_first)
        return {"checkpoints": page, "cursor": cursor}

    def set_ttl(self, request: HttpRequest, body: bodies.SetTtl) -> dict[str, Any]:
        self._checkpoints.set_ttl(_path(request), body.ttl_seconds)
        return {}

    def delete_checkpoint(self, request: HttpRequest) -> Response:
        self._checkpoints.delete(_path(request))
        return Response(status_code=204)

    def archive(self, request: HttpRequest) -> Response:
        """The model's files as one tar file."""
        checkpoint = self._checkpoints.find(_path(request), check=True)
        packed = tempfile.NamedTemporaryFile(suffix=".tar")  # noqa: SIM115  # closed when it was sent
        with tarfile.open(packed.name, "w") as tar:
            for file in checkpoint.files:
                tar.add(file, arcname=file.name)
        name, end = f"{checkpoint.path.name}.tar", BackgroundTask(packed.close)
        return FileResponse(packed.name, filename=name, media_type="application/x-tar", background=end)

    def file_urls(self, request: HttpRequest) -> dict[str, Any]:
        checkpoint = self._checkpoints.find(_path(request), check=True)
        here = str(request.url).removesuffix("/external_weights_urls")
        urls = {file.name: f"{here}/files/{file.name}" for file in checkpoint.files}
        return {"urls": urls, "expires": _time(time.time() + _URLS_S)}

    def file(self, request: HttpRequest) -> Response:
        checkpoint = self._checkpoints.find(_path(request))
        files = {file.name: file for file in checkpoint.files}
        name = request.path_params["file"]
        if name not in files:
            raise NotFound(f"{checkpoint.path} has no file {name!r}; it has {', '.join(files)}")
        return FileResponse(files[name])

    def _checkpoints_of(self, run_ids: Sequence[str]) -> list[dict[str, Any]]:
        return [
            {
                "checkpoint_id": f"{saved.path.kind}/{saved.path.name}", "checkpoint_type": _TYPES[saved.path.kind],
                "time": _time(saved.created), "tinker_path": str(saved.path), "size_bytes": folder_size(saved.folder),
                "public": False, "user_metadata": saved.user_metadata,
                "expires_at": None if saved.expires is None else _time(saved.expires),
            }
            for run_id in run_ids
            for saved in self._checkpoints.of_run(run_id)
        ]  # fmt: skip

    def _run(self, run_id: str) -> dict[str, Any]:
        folder = self._checkpoints.run(run_id)
        about = folder.record["tinker"]
        last = {c["checkpoint_type"]: c for c in self._checkpoints_of([run_id])}  # the newest of each comes last
        changed = folder.metrics_file if folder.metrics_file.exists() else folder.record_file
        rank, metadata = int(about["spec"]["rank"]), about.get("user_metadata") or {}
        return {
            "training_run_id": run_id, "base_model": about["base_model"], "model_owner": "palestra",
            "is_lora": rank > 0, "lora_rank": rank, "corrupted": False,
            "last_request_time": _time(changed.stat().st_mtime), "last_checkpoint": last.get("training"),
            "last_sampler_checkpoint": last.get("sampler"),
            "user_metadata": {key: v if isinstance(v, str) else json.dumps(v) for key, v in metadata.items()},
        }  # fmt: skip


def _path(request: HttpRequest) -> TinkerPath:
    parts = request.path_params
    return TinkerPath.parse(f"tinker://{parts['run_id']}/{parts['kind']}/{parts['name']}")


def _page(request: HttpRequest, rows: Sequence[T]) -> tuple[Sequence[T], dict[str, int]]:
    """The rows that the request asks for, and its cursor."""
    try:
        offset, limit = (int(request.query_params.get(*pair)) for pair in (("offset", 0), ("limit", 20)))
    except ValueError:
        raise refuse(400, "offset and limit are whole numbers") from None
    if offset < 0 or not 1 <= limit <= 10_000:
        raise refuse(400, f"offset={offset} and limit={limit}; expected 0 or more, and 1 to 10000")
    return rows[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(rows)}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
