"""The tensors of a model folder, read one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from palestra.core.errors import PalestraError


class FolderWeights(Mapping[str, torch.Tensor]):
    """The safetensors files of a model folder as one mapping; each access reads the tensor from disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        for path in self._files():
            try:
                with safe_open(path, "pt") as file:
                    self._file_of |= {name: path for name in file.keys()}  # noqa: SIM118 (not a mapping)
            except (OSError, SafetensorError) as error:
                raise PalestraError(f"the weights {path} cannot be read ({error}); save the model again") from error

    def _files(self) -> list[Path]:
        index = self.folder / "model.safetensors.index.json"
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
        return [self.folder / name for name in sorted(names)]

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(self._file_of[name], "pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)
