"""A trained model as a Hugging Face folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from palestra.core.errors import PalestraError
from palestra.core.files import write_json
from palestra.export.merge import merged_copy
from palestra.models.adapters import RECORD, base_record


def save_hf(
    model: Any, tokenizer: Any, folder: Path, *, merge: bool = False, record: Mapping[str, Any] | None = None
) -> Path:
    """Save weights, generation config, tokenizer with its chat template, and `palestra.json`.

    An adapter is saved as an adapter; with `merge` the folder is the whole model, and the adapter stands in `adapter/`.
    Written aside and renamed, so that `folder` is whole or untouched.
    """
    is_adapter = hasattr(model, "peft_config")
    known = {**(record or {}), **(base_record(model) if is_adapter else {})}
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        _write(merged_copy(model) if merge else model, aside)
        tokenizer.save_pretrained(aside)
        write_json(aside / RECORD, dict(record or {}) if merge else known)
        if merge and is_adapter:
            _write(model, aside / "adapter")
            write_json(aside / "adapter" / RECORD, known)
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or error
        raise PalestraError(
            f"the model could not be saved to {folder} ({why}); free some space or choose another path"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _write(model: Any, folder: Path) -> None:
    # "auto" would ask the hub about the vocabulary of an adapter's base
    model.save_pretrained(folder, **({"save_embedding_layers": False} if hasattr(model, "peft_config") else {}))
