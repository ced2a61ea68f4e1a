"""A model as a GGUF file of any type: by us, or by the programs of llama.cpp."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from palestra.core.errors import MissingPackageError, ServiceError, SettingError, did_you_mean
from palestra.core.files import replacing
from palestra.core.secrets import clean_environment
from palestra.extras.gguf.config import is_written_here
from palestra.extras.gguf.write import TYPES, Progress, write_gguf
from palestra.models.export.hf import ModelSource

PROGRAM = "llama-quantize"
CONVERTER = "convert_hf_to_gguf.py"
QUANTIZED = tuple(
    "q4_0 q4_1 q5_0 q5_1 q2_k q2_k_s q3_k q3_k_s q3_k_m q3_k_l q4_k q4_k_s q4_k_m q5_k q5_k_s q5_k_m q6_k "
    "tq1_0 tq2_0 iq3_xs iq3_s iq3_m iq3_xxs iq4_nl iq4_xs".split()
)
_HOMES = ("~", "~/code", "~/projects", "~/src", "/opt", ".")  # usual places of a checkout
_USUAL_FOLDERS = (*(f"{home}/llama.cpp" for home in _HOMES), "~/.local", "/usr/local", "/opt/homebrew")
_BUILD = f"build it there with: cmake -B build && cmake --build build --target {PROGRAM}"


def to_gguf(
    source: ModelSource,
    path: Path,
    *,
    type: str = "q8_0",
    llama_cpp: str | None = None,
    progress: Progress = lambda done, total: None,
) -> Path:
    """Write the model as GGUF: f32, f16, bf16 and q8_0 directly, other types through llama.cpp's quantiser.

    Architectures that are not written here go through llama.cpp's converter, if there is one.
    """
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
            if program := next(_programs_in(Path(folder).expanduser()), None):
                return program
            searched = "the folder itself, bin and build/bin"
            raise SettingError(f"{name}={folder} has no {PROGRAM} (searched: {searched}); {_BUILD}")
    if on_path := shutil.which(PROGRAM):
        return Path(on_path)
    folders = [Path(folder).expanduser() for folder in _USUAL_FOLDERS]
    if program := next((program for folder in folders for program in _programs_in(folder)), None):
        return program
    needed = f"types other than f32, f16, bf16 and q8_0 need llama.cpp's {PROGRAM}"
    if checkout := next((folder for folder in folders if (folder / "CMakeLists.txt").is_file()), None):
        raise MissingPackageError(f"{needed}, which {checkout} has not built yet; {_BUILD}")
    raise MissingPackageError(
        f"{needed}, which was not found on PATH nor in {', '.join(_USUAL_FOLDERS)}; "
        "set LLAMA_CPP_PATH to llama.cpp's folder, or use type q8_0"
    )


def _programs_in(folder: Path) -> Iterator[Path]:
    for candidate in (folder, folder / PROGRAM, folder / "bin" / PROGRAM, folder / "build" / "bin" / PROGRAM):
        if candidate.is_file() and os.access(candidate, os.X_OK):
            yield candidate
