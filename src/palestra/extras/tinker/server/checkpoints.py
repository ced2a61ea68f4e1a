"""tinker:// paths: what clients have saved, in the folders of their runs, so they survive restarts.

>>> str(TinkerPath.parse("tinker://s1:train:0/weights/step-10"))
'tinker://s1:train:0/weights/step-10'
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from palestra.core.errors import InputError, PalestraError, StateError, StorageError
from palestra.core.files import MANIFEST, folder_size, verify_folder, write_folder, write_json
from palestra.core.run_folder import RunFolder
from palestra.core.weights import saved_tensors
from palestra.extras.tinker.server.base_model import AdapterSpec
from palestra.extras.tinker.server.futures import NotFound

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
    def size_bytes(self) -> int:
        return folder_size(self.folder)

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
