"""A model as a GGUF file of any type."""

from __future__ import annotations

from pathlib import Path

import torch

from palestra.core.errors import SettingError, did_you_mean
from palestra.extras.gguf.config import is_written_here
from palestra.extras.gguf.write import (
    QUANTIZED,
    TYPES,
    Progress,
    find_llama_converter,
    find_llama_quantize,
    llama_convert,
    llama_quantize,
    write_gguf,
)
from palestra.models.export.source import ModelSource


def to_gguf(
    source: ModelSource,
    path: Path,
    *,
    type: str = "q8_0",
    llama_cpp: str | None = None,
    progress: Progress = lambda done, total: None,
) -> Path:
    """Write the model as GGUF: f32, f16, bf16 and q8_0 directly, other types through llama.cpp's quantiser.

    Architectures that are not written here go through llama.cpp's converter, where there is one.
    """
    type = type.lower()
    types = (*TYPES, *QUANTIZED)
    if type not in types:
        raise SettingError(f"there is no GGUF type {type!r}; use one of {', '.join(types)}.{did_you_mean(type, types)}")

    converter = None if is_written_here(source.config) else find_llama_converter(llama_cpp)

    def write(target: Path, own_type: str) -> None:
        if converter is not None:
            with source.in_folder() as folder:
                llama_convert(converter, folder, target, own_type)
            return
        write_gguf(
            source.weights, source.config, source.tokenizer, target, type=own_type, name=source.name, progress=progress
        )

    if type in TYPES:
        write(path, type)
        return path
    program = find_llama_quantize(llama_cpp)
    unquantized = path.with_name(f".{path.stem}-16bit.gguf")
    try:
        write(unquantized, "bf16" if source.dtype == torch.bfloat16 else "f16")
        return llama_quantize(program, unquantized, path, type)
    finally:
        unquantized.unlink(missing_ok=True)
