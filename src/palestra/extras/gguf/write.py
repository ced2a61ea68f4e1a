"""A model as one GGUF file for llama.cpp, Ollama and similar programs.

Tensors are converted and written one after the other, so that a large model needs little memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from palestra.core.errors import (
    InputError,
    ResourceError,
    SettingError,
    StorageError,
    UnsupportedError,
    did_you_mean,
)
from palestra.core.files import free_bytes, replacing
from palestra.extras.gguf.config import architecture_of, config_to_gguf, convert_weight, tensor_names
from palestra.extras.gguf.file import require_gguf
from palestra.extras.gguf.rope import rope_tensors
from palestra.extras.gguf.tokenizer import model_name, tokenizer_to_gguf

# type of the matrices -> general.file_type
TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
_VALUE_TYPES = {str: "STRING", bool: "BOOL", int: "UINT32", float: "FLOAT32", list: "ARRAY"}
_Q8_BLOCK = 32  # numbers that share a scale
_HEADER_BYTES = 64 * 2**20  # more than any vocabulary takes

Progress = Callable[[int, int], None]  # bytes written, bytes in all


def write_gguf(
    weights: Mapping[str, torch.Tensor],
    config: Any,
    tokenizer: Any,
    path: Path,
    *,
    type: str = "f16",
    name: str = "palestra model",
    progress: Progress = lambda done, total: None,
) -> Path:
    """Write weights (by transformers' names), config, tokenizer and chat template as one GGUF file.

    `type` is that of the matrices: f32, f16, bf16 or q8_0; vectors stay f32. An existing file is replaced at the end.
    """
    if type not in TYPES:
        raise SettingError(f"the GGUF type {type!r} is not one of {', '.join(TYPES)}.{did_you_mean(type, TYPES)}")
    require_gguf()
    import gguf

    prefix = architecture_of(config).name
    metadata = {
        "general.name": model_name(name, tokenizer),
        "general.type": "model",
        "general.file_type": int(gguf.LlamaFileType[TYPES[type]]),
        "general.quantization_version": int(gguf.GGML_QUANT_VERSION),
        **{f"{prefix}.{key}": value for key, value in config_to_gguf(config).items()},
        **tokenizer_to_gguf(tokenizer, config.vocab_size),
    }
    tensors = sorted(_plan(config, weights, type), key=_by_name_and_layer)
    total = sum(prod(shape) for _, _, shape, _ in tensors)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if (free := free_bytes(path.parent)) < (needed := total + _HEADER_BYTES):
            raise ResourceError(
                f"{path.parent} has {free / 2**20:,.0f} MiB free, and the export needs about {needed / 2**20:,.0f} "
                "MiB; free some space or choose another path"
            )
        with replacing(path) as temporary, closing(gguf.GGUFWriter(temporary, prefix)) as writer:
            for key, value in metadata.items():
                writer.add_key_value(key, value, gguf.GGUFValueType[_VALUE_TYPES[value.__class__]])
            for tensor, kind, shape, _ in tensors:
                writer.add_tensor_info(tensor, shape, np.dtype(np.uint8), prod(shape), raw_dtype=kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            done = 0
            for tensor, kind, shape, load in tensors:
                values = load().detach().to("cpu").float().contiguous()
                if kind.name == "F16" and not torch.isfinite(values.half()).all():
                    raise InputError(f"{tensor} has numbers that f16 cannot hold; use type bf16 or f32")
                writer.write_tensor_data(gguf.quants.quantize(values.numpy(), kind))
                done += prod(shape)
                progress(done, total)
    except OSError as error:
        raise StorageError(
            f"{path} could not be written ({error.strerror or error}); free some space or choose another path"
        ) from error
    return path


def _by_name_and_layer(tensor: tuple[str, Any, Any, Any]) -> list[tuple[int, str]]:
    """Layer 10 after layer 9: the same model gives the same file, whatever the order of its weights."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in tensor[0].split(".")]


def _plan(
    config: Any, weights: Mapping[str, torch.Tensor], type: str
) -> Iterator[tuple[str, Any, tuple[int, ...], Callable[[], torch.Tensor]]]:
    """Each tensor's GGUF name, gguf's number of its type, its shape in bytes, and the function that makes it."""
    import gguf

    architecture = architecture_of(config)
    gguf_name = tensor_names(architecture, config.num_hidden_layers)

    def converted(name: str) -> torch.Tensor:
        return convert_weight(architecture, config, name, weights[name], to_gguf=True)

    for name, tensor in rope_tensors(config).items():
        yield name, gguf.GGMLQuantizationType.F32, (*tensor.shape[:-1], 4 * tensor.shape[-1]), tensor.clone
    for name in weights:
        is_tied = name == "lm_head.weight" and config.tie_word_embeddings
        if is_tied or name.endswith("rotary_emb.inv_freq"):  # old checkpoints hold it; it follows from the config
            continue
        target = gguf_name(name)
        if target is None:
            raise UnsupportedError(
                f"the tensor {name!r} has no place in a GGUF file of {config.model_type}; "
                f"give an unmodified {config.model_type} model"
            )
        shape = tuple(weights[name].shape)
        own_type = "f16" if type == "q8_0" and shape[-1] % _Q8_BLOCK else type  # a block is part of one row
        kind = gguf.GGMLQuantizationType["F32" if len(shape) < 2 else own_type.upper()]
        yield target, kind, gguf.quant_shape_to_byte_shape(shape, kind), partial(converted, name)
