"""A model as one GGUF file for llama.cpp, Ollama and similar programs.

Tensors are converted and written one after the other, so that a large model needs little memory.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from palestra.core.files import replacing
from palestra.core.secrets import clean_environment
from palestra.extras.gguf.config import architecture_of, config_to_gguf, tensor_names, weight_to_gguf
from palestra.extras.gguf.file import require_gguf
from palestra.extras.gguf.rope import rope_tensors
from palestra.extras.gguf.tokenizer import model_name, tokenizer_to_gguf

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFWriter

# type of the matrices -> general.file_type
TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
_Q8_BLOCK = 32  # numbers that share a scale
_HEADER_BYTES = 64 * 2**20  # more than any vocabulary takes

# Types that only llama.cpp's own program makes
PROGRAM = "llama-quantize"
CONVERTER = "convert_hf_to_gguf.py"
QUANTIZED = tuple(
    "q4_0 q4_1 q5_0 q5_1 q2_k q2_k_s q3_k q3_k_s q3_k_m q3_k_l q4_k q4_k_s q4_k_m q5_k q5_k_s q5_k_m q6_k "
    "tq1_0 tq2_0 iq3_xs iq3_s iq3_m iq3_xxs iq4_nl iq4_xs".split()
)
_HOMES = ("~", "~/code", "~/projects", "~/src", "/opt", ".")  # where people keep a checkout
_USUAL_FOLDERS = (*(f"{home}/llama.cpp" for home in _HOMES), "~/.local", "/usr/local", "/opt/homebrew")
_BUILD = f"cmake -B build && cmake --build build --target {PROGRAM}"

Progress = Callable[[int, int], None]  # bytes written, bytes in all


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor as it will be written: its GGUF name, type and shape, and the function that makes it."""

    name: str
    type: str
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        import gguf

        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.type.upper()]]
        return torch.Size(self.shape).numel() // block * block_bytes


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
    metadata = _metadata(config, tokenizer, type, name)
    tensors = sorted(_plan(config, weights, type), key=_by_name_and_layer)
    total = sum(tensor.nbytes for tensor in tensors)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_space(path.parent, total + _HEADER_BYTES)
        with replacing(path) as temporary:
            _write(temporary, architecture_of(config).name, metadata, tensors, lambda done: progress(done, total))
    except OSError as error:
        raise StorageError(
            f"{path} could not be written ({error.strerror or error}); free some space or choose another path"
        ) from error
    return path


def _metadata(config: Any, tokenizer: Any, type: str, name: str) -> dict[str, Any]:
    """All key-value pairs of the file except general.architecture, which the writer of the gguf package adds."""
    import gguf

    prefix = architecture_of(config).name
    return {
        "general.name": model_name(name, tokenizer),
        "general.type": "model",
        "general.file_type": int(gguf.LlamaFileType[TYPES[type]]),
        "general.quantization_version": int(gguf.GGML_QUANT_VERSION),
        **{f"{prefix}.{key}": value for key, value in config_to_gguf(config).items()},
        **tokenizer_to_gguf(tokenizer, config.vocab_size),
    }


def _plan(config: Any, weights: Mapping[str, torch.Tensor], type: str) -> Iterator[PlannedTensor]:
    architecture = architecture_of(config)
    gguf_name = tensor_names(architecture, config.num_hidden_layers)

    def converted(name: str) -> torch.Tensor:
        return weight_to_gguf(architecture, config, name, weights[name])

    ropes = rope_tensors(config)
    for name, tensor in ropes.items():
        yield PlannedTensor(name, "f32", tuple(tensor.shape), partial(ropes.__getitem__, name))
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
        yield PlannedTensor(target, _type_for(shape, type), shape, partial(converted, name))


def _by_name_and_layer(tensor: PlannedTensor) -> list[tuple[int, str]]:
    """Layer 10 after layer 9: the same model gives the same file, in whichever order its weights are read."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in tensor.name.split(".")]


def _type_for(shape: tuple[int, ...], type: str) -> str:
    """Vectors stay f32; matrices whose rows are not a multiple of a q8_0 block stay f16."""
    if len(shape) < 2:
        return "f32"
    return "f16" if type == "q8_0" and shape[-1] % _Q8_BLOCK else type


def _write(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: list[PlannedTensor],
    progress: Callable[[int], None],
) -> None:
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, architecture)
    try:
        for key, value in metadata.items():
            _add(writer, key, value)
        for tensor in tensors:
            raw = gguf.GGMLQuantizationType[tensor.type.upper()]
            # With a dtype other than uint8, the writer counts the shape in numbers, not in bytes.
            writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done = 0
        for tensor in tensors:
            writer.write_tensor_data(_encode(tensor))
            done += tensor.nbytes
            progress(done)
    finally:
        writer.close()


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    from gguf import GGUFValueType

    kinds = {str: "STRING", bool: "BOOL", int: "UINT32", float: "FLOAT32", list: "ARRAY"}
    writer.add_key_value(key, value, GGUFValueType[kinds[type(value)]])


def _encode(tensor: PlannedTensor) -> np.ndarray[Any, Any]:
    """The bytes of a tensor in its GGUF type."""
    import gguf

    values = tensor.load().detach().to("cpu").contiguous()
    match tensor.type:
        case "f32":
            return values.float().numpy()
        case "f16":
            half = values.half()
            if not torch.isfinite(half).all():
                raise InputError(f"{tensor.name} has numbers that f16 cannot hold; use type bf16 or f32")
            return half.numpy()
        case "bf16":
            return values.bfloat16().view(torch.uint8).numpy()
    return gguf.quants.quantize(values.float().numpy(), gguf.GGMLQuantizationType.Q8_0)


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ResourceError(
            f"{folder} has {free / 2**20:,.0f} MiB free, and the export needs about {needed / 2**20:,.0f} MiB; "
            "free some space or choose another path"
        )


def run_program(
    command: list[str], failure: str, *, made: Path | None = None, env: Mapping[str, str] | None = None, hint: str = ""
) -> None:
    """Run a program. PalestraError, with the last line of its output, if it fails or does not write the file `made`."""
    result = subprocess.run(command, capture_output=True, text=True, errors="replace", env=env)
    if result.returncode or (made is not None and not made.is_file()):
        lines = (result.stderr.strip() or result.stdout.strip() or "no output").splitlines()
        raise ServiceError(f"{failure} (exit {result.returncode}): {lines[-1]}{hint}")


def find_llama_quantize(llama_cpp: str | None = None) -> Path:
    """The program in the llama.cpp folder of the argument or of LLAMA_CPP_PATH, on PATH or in a usual folder."""
    for name, folder in (("llama_cpp_path", llama_cpp), ("LLAMA_CPP_PATH", os.environ.get("LLAMA_CPP_PATH"))):
        if folder:
            program = next(_programs_in(Path(folder).expanduser()), None)
            if program is None:
                raise SettingError(
                    f"{name}={folder} has no {PROGRAM} (searched: the folder itself, bin and build/bin); build it "
                    f"there with: {_BUILD}"
                )
            return program
    if on_path := shutil.which(PROGRAM):
        return Path(on_path)
    folders = [Path(folder).expanduser() for folder in _USUAL_FOLDERS]
    if program := next((program for folder in folders for program in _programs_in(folder)), None):
        return program
    needed = f"types other than f32, f16, bf16 and q8_0 need llama.cpp's {PROGRAM}"
    if checkout := next((folder for folder in folders if (folder / "CMakeLists.txt").is_file()), None):
        raise MissingPackageError(f"{needed}, which {checkout} has not built yet; build it there with: {_BUILD}")
    raise MissingPackageError(
        f"{needed}, which was not found on PATH nor in {', '.join(_USUAL_FOLDERS)}; "
        "set LLAMA_CPP_PATH to llama.cpp's folder, or use type q8_0"
    )


def find_llama_converter(llama_cpp: str | None = None) -> Path | None:
    """convert_hf_to_gguf.py in the llama.cpp folder of the argument, of LLAMA_CPP_PATH, or in a usual folder."""
    folders = [llama_cpp, os.environ.get("LLAMA_CPP_PATH"), *_USUAL_FOLDERS]
    scripts = (Path(folder).expanduser() / CONVERTER for folder in folders if folder)
    return next((script for script in scripts if script.is_file()), None)


def llama_convert(script: Path, folder: Path, path: Path, type: str) -> Path:
    """Write a model folder as GGUF with llama.cpp's own converter, which knows more architectures than we do."""
    with replacing(path) as partial:
        command = [sys.executable, str(script), str(folder), "--outfile", str(partial), "--outtype", type]
        run_program(command, f"{script} could not convert the model", made=partial, env=clean_environment())
    return path


def llama_quantize(program: Path, source: Path, path: Path, type: str) -> Path:
    """Convert the 16-bit file `source` to `path` in another type."""
    try:
        with replacing(path) as partial:
            command = [str(program), str(source), str(partial), type.upper()]
            run_program(command, f"{program} could not make {type}", made=partial)
    except OSError as error:
        raise ServiceError(f"{program} could not be run ({error.strerror or error})") from error
    return path


def _programs_in(folder: Path) -> Iterator[Path]:
    for candidate in (folder, folder / PROGRAM, folder / "bin" / PROGRAM, folder / "build" / "bin" / PROGRAM):
        if candidate.is_file() and os.access(candidate, os.X_OK):
            yield candidate
