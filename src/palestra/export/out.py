"""The ways out for a model: a Hugging Face folder, a GGUF file of any type."""

from __future__ import annotations

from pathlib import Path

import torch

from palestra.core.errors import PalestraError, did_you_mean
from palestra.export.hf import save_hf
from palestra.export.source import ModelSource, read_record
from palestra.gguf.quantize import QUANTIZED, find_llama_quantize, quantize
from palestra.gguf.write import TYPES, Progress, write_gguf
from palestra.models.loading import load_model


def to_hf(name: str, folder: Path) -> Path:
    """The model, an adapter merged into its base, as a folder that every Hugging Face library loads."""
    loaded = load_model(name, device="cpu")
    record = read_record(Path(name).expanduser())
    record.pop("base", None)  # of an adapter, which this is no longer
    return save_hf(loaded.model, loaded.tokenizer, folder, record=record)


def to_gguf(
    source: ModelSource,
    path: Path,
    *,
    type: str = "q8_0",
    llama_cpp: str | None = None,
    progress: Progress = lambda done, total: None,
) -> Path:
    """Write the model as GGUF: f32, f16, bf16 and q8_0 by ourselves, other types through llama.cpp."""
    type = type.lower()
    if type not in TYPES + QUANTIZED:
        known = TYPES + QUANTIZED
        raise PalestraError(
            f"there is no GGUF type {type!r}; use one of {', '.join(known)}.{did_you_mean(type, known)}"
        )
    program = None if type in TYPES else find_llama_quantize(llama_cpp)
    whole = path if program is None else path.with_name(f".{path.stem}-16bit.gguf")
    half = "bf16" if source.dtype == torch.bfloat16 else "f16"
    own_type = type if program is None else half
    try:
        write_gguf(
            source.weights, source.config, source.tokenizer, whole, type=own_type, name=source.name, progress=progress
        )
        return path if program is None else quantize(program, whole, path, type)
    finally:
        if whole != path:
            whole.unlink(missing_ok=True)
