"""A trained model as a Hugging Face folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palestra.core.errors import PalestraError
from palestra.core.files import write_json


def save_hf(
    model: Any, tokenizer: Any, folder: Path, *, merge: bool = False, record: Mapping[str, Any] | None = None
) -> Path:
    """Save weights (an adapter as an adapter, or merged into its base), tokenizer and `palestra.json`.

    Written aside and renamed, so that `folder` is whole or untouched.
    """
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        (merged_copy(model) if merge else model).save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        write_json(aside / "palestra.json", dict(record or {}))
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise PalestraError(
            f"the model could not be saved to {folder} ({error.strerror or error}); choose another path"
        ) from error
    return folder


def merged_copy(model: Any) -> Any:
    """The plain model with its adapter's weights added in; the adapter itself stays as it is."""
    if not hasattr(model, "merge_and_unload"):
        return model
    import copy

    return copy.deepcopy(model).merge_and_unload()
