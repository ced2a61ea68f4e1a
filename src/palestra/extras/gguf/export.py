"""A model as a GGUF file of any type: by us, or by the programs of llama.cpp."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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
    MissingPackageError,
    ResourceError,
    ServiceError,
    SettingError,
    StorageError,
    UnsupportedError,
    did_you_mean,
)
from palestra.core.files import free_bytes, replacing
from palestra.core.secrets import clean_environment
from palestra.extras.gguf.config import (
    architecture_of,
    config_to_gguf,
    convert_weight,
    is_written_here,
    rope_tensors,
    tensor_names,
)
from palestra.extras.gguf.file import require_gguf
from palestra.extras.gguf.source import ModelSource
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


PROGRAM = "llama-quantize"
CONVERTER = "convert_hf_to_gguf.py"
QUANTIZED = tuple(
    "q4_0 q4_1 q5_0 q5_1 q2_k q2_k_s q3_k q3_k_s q3_k_m q3_k_l q4_k q4_k_s q4_k_m q5_k q5_k_s q5_k_m q6_k "
    "tq1_0 tq2_0 iq3_xs iq3_s iq3_m iq3_xxs iq4_nl iq4_xs".split()
)
_HOMES = ("~", "~/code", "~/projects", "~/src", "/opt", ".")  # usual places of a checkout
_USUAL_FOLDERS = (*(f"{home}/llama.cpp" for home in _HOMES), "~/.local", "/usr/local", "/opt/homebrew")
_PLACES = ("", "bin", "build/bin")
_BUILD = f"build it there with: cmake -B build && cmake --build build --target {PROGRAM}"


def to_gguf(
    source: ModelSource,
    path: Path,
    *,
    type: str = "q8_0",
    llama_cpp: str | None = None,
    progress: Progress = lambda done, total: None,
) -> Path:
    """Write the model as GGUF. Types that are not in TYPES, and other architectures, need the programs of llama.cpp."""
    type = type.lower()
    types = (*TYPES, *QUANTIZED)
    if type not in types:
        raise SettingError(f"there is no GGUF type {type!r}; use one of {', '.join(types)}.{did_you_mean(type, types)}")
    if type in QUANTIZED:
        program = find_llama_quantize(llama_cpp)
        unquantized = path.with_name(f".{path.stem}-16bit.gguf")
        try:
            own_type = "bf16" if source.dtype == torch.bfloat16 else "f16"
            to_gguf(source, unquantized, type=own_type, llama_cpp=llama_cpp, progress=progress)
            with replacing(path) as partial:
                command = [str(program), str(unquantized), str(partial), type.upper()]
                run_program(command, f"{program} could not make {type}", made=partial)
        finally:
            unquantized.unlink(missing_ok=True)
        return path
    folders = [llama_cpp, os.environ.get("LLAMA_CPP_PATH"), *_USUAL_FOLDERS]
    scripts = (Path(folder).expanduser() / CONVERTER for folder in folders if folder)
    script = None if is_written_here(source.config) else next((script for script in scripts if script.is_file()), None)
    if script is None:
        options = {"type": type, "name": source.name}
        return write_gguf(source.weights, source.config, source.tokenizer, path, progress=progress, **options)
    with source.in_folder() as folder, replacing(path) as partial:
        command = [sys.executable, str(script), str(folder), "--outfile", str(partial), "--outtype", type]
        run_program(command, f"{script} could not convert the model", made=partial, env=clean_environment())
    return path


def run_program(
    command: list[str], failure: str, *, made: Path | None = None, env: Mapping[str, str] | None = None, hint: str = ""
) -> None:
    """Run a program. PalestraError, with the last line of its output, if it fails or does not write the file `made`."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", env=env)
    except OSError as error:
        raise ServiceError(f"{command[0]} could not be run ({error.strerror or error}){hint}") from error
    if result.returncode or (made is not None and not made.is_file()):
        lines = (result.stderr.strip() or result.stdout.strip() or "no output").splitlines()
        raise ServiceError(f"{failure} (exit {result.returncode}): {lines[-1]}{hint}")


def find_llama_quantize(llama_cpp: str | None = None) -> Path:
    """The program in the llama.cpp folder of the argument or of LLAMA_CPP_PATH, on PATH or in a usual folder."""
    for name, folder in (("llama_cpp_path", llama_cpp), ("LLAMA_CPP_PATH", os.environ.get("LLAMA_CPP_PATH"))):
        if folder:
            if program := shutil.which(folder) or shutil.which(PROGRAM, path=_places(folder)):
                return Path(program)
            searched = "the folder itself, bin and build/bin"
            raise SettingError(f"{name}={folder} has no {PROGRAM} (searched: {searched}); {_BUILD}")
    if program := shutil.which(PROGRAM) or shutil.which(PROGRAM, path=_places(*_USUAL_FOLDERS)):
        return Path(program)
    needed = f"types other than f32, f16, bf16 and q8_0 need llama.cpp's {PROGRAM}"
    folders = (Path(folder).expanduser() for folder in _USUAL_FOLDERS)
    if checkout := next((folder for folder in folders if (folder / "CMakeLists.txt").is_file()), None):
        raise MissingPackageError(f"{needed}, which {checkout} has not built yet; {_BUILD}")
    raise MissingPackageError(
        f"{needed}, which was not found on PATH nor in {', '.join(_USUAL_FOLDERS)}; "
        "set LLAMA_CPP_PATH to llama.cpp's folder, or use type q8_0"
    )


def _places(*folders: str) -> str:
    """The folders, and where llama.cpp is built in them, as a search path."""
    return os.pathsep.join(str(Path(folder).expanduser() / place) for folder in folders for place in _PLACES)
