"""The endpoints of the SDK's RestClient: training runs and their checkpoints, listed, downloaded, deleted."""

from __future__ import annotations

import json
import tarfile
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

from starlette.background import BackgroundTask
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response

from palestra.extras.tinker.server import requests as bodies
from palestra.extras.tinker.server.checkpoints import Checkpoints, TinkerPath
from palestra.extras.tinker.server.futures import NotFound
from palestra.servers.web import refuse

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
                "time": _time(saved.created), "tinker_path": str(saved.path), "size_bytes": saved.size_bytes,
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
