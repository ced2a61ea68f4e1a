"""Adapters made part of the model that they were trained on."""

from __future__ import annotations

import copy
from typing import Any

from palestra.core.errors import PalestraError


def merged_copy(model: Any) -> Any:
    """The plain model with its adapter's weights added in; the adapter itself stays as it is."""
    if not hasattr(model, "merge_and_unload"):
        return model
    if getattr(model, "is_loaded_in_4bit", False):
        raise PalestraError(
            "the base of this adapter is held in 4 bits, too coarse to merge into; save the adapter (merged=False), "
            "then `palestra export FOLDER --to hf` merges it into the base in full"
        )
    return copy.deepcopy(model).merge_and_unload()
