"""A model as a GGUF file of any type: by us, or by the programs of llama.cpp. And for Ollama.

Ollama gets the GGUF file and a Modelfile; `ollama create` runs where it is installed.
"""

from __future__ import annotations

import os
import re
import shlex
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
from palestra.core.files import free_bytes, replacing, write_text
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
from palestra.extras.gguf.tokenizer import chat_template, model_name, tokenizer_to_gguf
from palestra.models.loading import TINY

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
        raise StorageError(f"{path} could not be written ({error.strerror or error}); choose another path") from error
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


_MAX_CONTEXT = 8192  # longer ones need more memory than most machines have; PARAMETER num_ctx can be edited
_NAME = re.compile(r"[\w.-]+(/[\w.-]+){0,2}(:[\w.-]+)?")
_CHATML_STOPS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_LLAMA3_STOPS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
# family -> the strings that end an answer
STOPS = {
    TINY: _CHATML_STOPS,
    "chatml": _CHATML_STOPS,
    "qwen2": _CHATML_STOPS,
    "qwen3": _CHATML_STOPS,
    "llama3": _LLAMA3_STOPS,
    "llama3.1": _LLAMA3_STOPS,
    "mistral": ("[INST]", "[/INST]", "</s>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "phi3": ("<|user|>", "<|assistant|>", "<|end|>"),
}
# transformers' name of a setting -> Ollama's
_SAMPLING = {n: n for n in ("temperature", "top_p", "top_k", "min_p")} | {"repetition_penalty": "repeat_penalty"}


class OllamaModel(str):
    """The name of a model in Ollama, with its files, whether Ollama has created it, and the command that does.

    >>> f"litellm/ollama_chat/{OllamaModel('clerk', Path('a.gguf'), Path('Modelfile'), 'ollama create …', False)}"
    'litellm/ollama_chat/clerk'
    """

    def __new__(cls, name: str, gguf: Path, modelfile: Path, command: str, created: bool) -> OllamaModel:
        self = super().__new__(cls, name)
        self.name, self.gguf, self.modelfile, self.command, self.created = name, gguf, modelfile, command, created
        return self

    name: str
    gguf: Path
    modelfile: Path
    command: str
    created: bool


def to_ollama(
    source: ModelSource,
    name: str,
    folder: Path,
    *,
    type: str = "q8_0",
    llama_cpp: str | None = None,
    progress: Progress = lambda done, total: None,
) -> OllamaModel:
    """Write the GGUF file and the Modelfile to `folder`, and create the model if `ollama` is on PATH."""
    if not _NAME.fullmatch(name):
        raise SettingError(f"{name!r} is not a valid name in Ollama; use letters, digits, . - _ and one : before a tag")
    file = f"{re.sub(r'[^a-z0-9.]+', '-', name.lower()).strip('-.')}-{type.lower()}.gguf"
    text = modelfile(source, file)
    gguf = to_gguf(source, folder / file, type=type, llama_cpp=llama_cpp, progress=progress)
    path = folder / "Modelfile"
    write_text(path, text)
    program = shutil.which("ollama")
    command = ["ollama", "create", name, "-f", str(path.resolve())]
    if program is not None:
        hint = f". The files are complete; start Ollama, then run: {shlex.join(command)}"
        run_program([program, *command[1:]], "Ollama could not create the model", hint=hint)
    return OllamaModel(name, gguf, path, shlex.join(command), program is not None)


def modelfile(source: ModelSource, gguf: str) -> str:
    """The text of the Modelfile: weights, template, stop strings, sampling and the agent's instructions."""
    family, system = family_of(source.tokenizer), source.instructions
    context = getattr(source.config.get_text_config(), "max_position_embeddings", None)
    if is_written_here(source.config):
        context = config_to_gguf(source.config)["context_length"]
    parameters: dict[str, Any] = {"num_ctx": min(int(context or _MAX_CONTEXT), _MAX_CONTEXT)}
    for key, parameter in _SAMPLING.items():
        value = getattr(source.generation, key, None)
        if value is not None:
            parameters[parameter] = value
    if not system:  # Qwen 2.5 and SmolLM2: the template inserts one by default
        text = source.tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
        default = re.search(r"<\|im_start\|>system\n(.*?)<\|im_end\|>", text, re.DOTALL)
        system = default[1] if default else ""
    template = template_of(family)
    if '"""' in system + template:
        raise InputError('a Modelfile cannot hold three quotation marks in a row (""") in the instructions')
    lines = [f"FROM ./{gguf}", f'TEMPLATE """{template}"""', *([f'SYSTEM """{system}"""'] if system else [])]
    lines += [f"PARAMETER {name} {value}" for name, value in parameters.items()]
    lines += [f'PARAMETER stop "{stop}"' for stop in STOPS[family]]
    return "\n".join(lines) + "\n"


def template_of(family: str) -> str:
    """The family's chat template in Go's text/template.

    It renders the same text as the family's Jinja template, except that Ollama writes JSON without spaces. The text
    that begins a tool call is literal text in it, because Ollama detects from it how calls look in an answer.
    """
    path = Path(__file__).parent / "ollama_templates" / f"{family.rpartition('/')[2]}.gotmpl"
    return path.read_text(encoding="utf-8").removesuffix("\n")


def family_of(tokenizer: Any) -> str:
    """The model family whose conversation format the chat template renders."""
    text = chat_template(tokenizer)
    if "macro tool_line(tool)" in text:
        return TINY
    if "<|im_start|>" in text:
        return "qwen3" if "<think>" in text else "qwen2" if "XML tags" in text else "chatml"
    if "<|start_header_id|>" in text:
        return "llama3.1" if "Given the following functions" in text else "llama3"
    if "[INST]" in text and "<<SYS>>" not in text:
        return "mistral"
    if "<start_of_turn>" in text:
        return "gemma"
    if "<|end|>" in text:
        return "phi3"
    raise UnsupportedError(
        f"there is no Ollama template for this model's conversation format; supported are {', '.join(STOPS)}. "
        "Use --to gguf and write a Modelfile for it"
    )
