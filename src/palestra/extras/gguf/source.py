"""Models opened by any name for an export; the weights of a folder are read one by one."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from palestra.core.errors import UnreadableFileError
from palestra.models.export.hf import read_record
from palestra.models.loading import canonical_name, is_adapter, load_model, load_tokenizer


@dataclass(frozen=True)
class ModelSource:
    """A complete model, with weights that may be read lazily, and what else an export contains."""

    name: str  # to display
    weights: Mapping[str, torch.Tensor]
    config: Any
    tokenizer: Any
    generation: Any  # transformers' GenerationConfig
    instructions: str  # of the agent that it was trained for

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.weights.values())).dtype

    @contextmanager
    def in_folder(self) -> Iterator[Path]:
        """A Hugging Face folder of the model: its own, or a temporary one."""
        if isinstance(self.weights, FolderWeights):
            yield self.weights.folder
            return
        with tempfile.TemporaryDirectory() as made:
            self.config.save_pretrained(made)
            self.tokenizer.save_pretrained(made)
            save_file({name: w.clone() for name, w in self.weights.items()}, Path(made, "model.safetensors"))
            yield Path(made)


def open_source(name: str, display_name: str | None = None) -> ModelSource:
    """Open a model: folders are read tensor by tensor, adapters and other names are loaded into memory."""
    from transformers import AutoConfig, GenerationConfig

    folder = Path(name).expanduser()
    instructions = str(read_record(folder).get("instructions") or "")
    weights: Mapping[str, torch.Tensor]
    if folder.is_dir() and not is_adapter(folder):
        tokenizer = load_tokenizer(str(folder))
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            has_generation = (folder / "generation_config.json").is_file()
            generation = GenerationConfig.from_pretrained(folder) if has_generation else GenerationConfig()
        except (OSError, ValueError) as error:
            raise UnreadableFileError(f"{folder} cannot be read as a model: {str(error).splitlines()[0]}") from error
        weights = FolderWeights(folder)
    else:
        loaded = load_model(name, device="cpu")
        model, tokenizer = loaded.model, loaded.tokenizer
        weights, config, generation = model.state_dict(), model.config, model.generation_config
    # `tiny` of palestra/tiny, `my-agent-20260131-101500` of the model or a checkpoint in that run
    path = Path(canonical_name(name))
    path = path.parent if path.name == "model" or path.parent.name == "checkpoints" else path
    path = path.parent if path.name == "checkpoints" else path
    own_name = (path.stem if path.suffix == ".gguf" else path.name) or "model"
    return ModelSource(display_name or own_name, weights, config, tokenizer, generation, instructions)


class FolderWeights(Mapping[str, torch.Tensor]):
    """The safetensors files of a model folder as one mapping; each access reads the tensor from disk."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        index = folder / "model.safetensors.index.json"
        names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
        for path in (folder / name for name in sorted(names)):
            try:
                with safe_open(path, "pt") as file:
                    self._file_of |= {name: path for name in file.keys()}  # noqa: SIM118 (not a mapping)
            except (OSError, SafetensorError) as error:
                raise UnreadableFileError(
                    f"the weights {path} cannot be read ({error}); save the model again"
                ) from error

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(self._file_of[name], "pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)
