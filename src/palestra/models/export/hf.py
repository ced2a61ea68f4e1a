"""Models as Hugging Face folders: saved, and opened by any name for an export; adapters are merged into their base."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from palestra.core.errors import StorageError, UnreadableFileError, UnsupportedError
from palestra.core.files import write_json, write_text
from palestra.models.loading import RECORD, canonical_name, fingerprint, is_adapter, load_model, load_tokenizer


def to_hf(name: str, folder: Path) -> Path:
    """The model, an adapter merged into its base, as a folder that every Hugging Face library loads."""
    loaded = load_model(name, device="cpu")
    record = read_record(Path(name).expanduser())
    record.pop("base", None)  # the adapter is merged
    return save_hf(loaded.model, loaded.tokenizer, folder, record=record)


def save_hf(
    model: Any, tokenizer: Any, folder: Path, *, merge: bool = False, record: Mapping[str, Any] | None = None
) -> Path:
    """Save weights, generation config, tokenizer with its chat template, and `palestra.json`.

    An adapter is saved as an adapter; with `merge` the folder holds the whole model, and the adapter is in `adapter/`.
    """
    record = dict(record or {})
    with _written_aside(folder) as partial:
        whole = model
        if merge and hasattr(model, "merge_and_unload"):
            if getattr(model, "is_loaded_in_4bit", False):
                raise UnsupportedError(
                    "the base of this adapter is held in 4 bits, too coarse to merge into; save the adapter "
                    "(merged=False), then `palestra export FOLDER --to hf` merges it into the base in full precision"
                )
            whole = copy.deepcopy(model).merge_and_unload()  # the adapter itself stays as it is
        _write(whole, partial)
        write_tokenizer_and_card(whole, tokenizer, partial, record)
        if merge and hasattr(model, "peft_config"):
            _write(model, partial / "adapter")
            _write_record(model, partial / "adapter", record)
    return folder


def save_base(model: Any, tokenizer: Any, folder: Path) -> Path:
    """Save the model without its adapter, or as it is where it has none; weights are not copied in memory."""
    if not hasattr(model, "peft_config"):
        return save_hf(model, tokenizer, folder)
    base = model.get_base_model()
    state = base.state_dict().items()  # its layers are wrapped, and the adapter's are inside
    tensors = {name.replace(".base_layer.", "."): tensor for name, tensor in state if ".lora_" not in name}
    with _written_aside(folder) as partial:
        base.save_pretrained(partial, state_dict=tensors)
        tokenizer.save_pretrained(partial)
    return folder


def save_downloaded(
    download: Callable[[Path], Any], tokenizer: Any, folder: Path, *, base: str, record: Mapping[str, Any]
) -> Path:
    """Save a model that another machine has trained: an adapter to `base`, or a whole one, as its files come."""
    with _written_aside(folder) as partial:
        download(partial)
        tokenizer.save_pretrained(partial)
        write_json(partial / RECORD, dict(record))
        if is_adapter(partial):
            path = partial / "adapter_config.json"
            lora = {**json.loads(path.read_text(encoding="utf-8")), "base_model_name_or_path": base}
            write_json(path, lora)
            write_text(partial / "README.md", adapter_card(base, SimpleNamespace(**lora), record))
    return folder


@contextmanager
def _written_aside(folder: Path) -> Iterator[Path]:
    """A folder under a temporary name that is renamed at the end, so that `folder` is complete or untouched."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StorageError(
            f"the model could not be saved to {folder} ({reason}); free some space or choose another path"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_tokenizer_and_card(model: Any, tokenizer: Any, folder: Path, record: Mapping[str, Any]) -> None:
    """Complete a folder of weights: the tokenizer with its chat template, `palestra.json`, and an adapter's card."""
    tokenizer.save_pretrained(folder)
    _write_record(model, folder, record)


def _write_record(model: Any, folder: Path, record: Mapping[str, Any]) -> None:
    if not hasattr(model, "peft_config"):
        write_json(folder / RECORD, dict(record))
        return
    base = model.active_peft_config.base_model_name_or_path or ""
    # "mark" is the fingerprint's key since v0.1, whose records must stay readable
    write_json(folder / RECORD, {**record, "base": {"name": base, "mark": fingerprint(model)}})
    write_text(folder / "README.md", adapter_card(base, model.active_peft_config, record))


def agent_section(record: Mapping[str, Any]) -> list[str]:
    tools = [tool["function"] for tool in record.get("tools") or () if "function" in tool]
    lines = ["## The agent", ""] if tools or record.get("instructions") else []
    if record.get("instructions"):
        lines += ["Its instructions:", "", *(f"> {line}" for line in str(record["instructions"]).splitlines()), ""]
    if tools:
        described = ((tool["name"], str(tool.get("description") or "").partition("\n")[0]) for tool in tools)
        lines += ["Its tools:", "", *(f"- `{name}`: {text}" for name, text in described), ""]
    return lines


def adapter_card(base: str, lora: Any, record: Mapping[str, Any]) -> str:
    """The model card of an adapter: what is known of it, in place of peft's form to fill in."""
    modules = lora.target_modules if isinstance(lora.target_modules, str) else ", ".join(sorted(lora.target_modules))
    lines = [
        "---",
        f"base_model: {json.dumps(base)}",
        "library_name: peft",
        "tags: [lora, reinforcement-learning, palestra]",
        "---",
        f"A LoRA adapter (rank {lora.r}, alpha {lora.lora_alpha}) on {modules} of `{base}`,",
        "trained with Palestra by reinforcement learning. `palestra chat FOLDER` loads it with its base, of which",
        "`palestra.json` has a fingerprint.",
    ]
    if record.get("agent"):
        lines += ["", f"Trained as the agent: {record['agent']}"]
    return "\n".join([*lines, "", *agent_section(record)]).rstrip() + "\n"


def _write(model: Any, folder: Path) -> None:
    # "auto" would ask the hub for the vocabulary of an adapter's base
    model.save_pretrained(folder, **({"save_embedding_layers": False} if hasattr(model, "peft_config") else {}))


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


def read_record(folder: Path) -> dict[str, Any]:
    """The record that a run saves with its model; empty for other models."""
    path = folder / RECORD
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


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
