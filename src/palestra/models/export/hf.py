"""Models saved as Hugging Face folders; adapters are merged into their base."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from palestra.core.errors import StorageError, UnsupportedError
from palestra.core.files import write_json, write_text
from palestra.models.loading import RECORD, fingerprint, load_model


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
    with written_aside(folder) as partial:
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


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
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


def read_record(folder: Path) -> dict[str, Any]:
    """The record that a run saves with its model; empty for other models."""
    path = folder / RECORD
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
