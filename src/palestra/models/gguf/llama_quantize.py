"""GGUF types that only llama.cpp's own `llama-quantize` can make."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from palestra.core.errors import PalestraError
from palestra.core.files import replacing

PROGRAM = "llama-quantize"
QUANTIZED = tuple(
    "q4_0 q4_1 q5_0 q5_1 q2_k q2_k_s q3_k q3_k_s q3_k_m q3_k_l q4_k q4_k_s q4_k_m q5_k q5_k_s q5_k_m q6_k "
    "tq1_0 tq2_0 iq3_xs iq3_s iq3_m iq3_xxs iq4_nl iq4_xs".split()
)
_HOMES = ("~", "~/code", "~/projects", "~/src", "/opt", ".")  # where people keep a checkout
_USUAL_FOLDERS = (*(f"{home}/llama.cpp" for home in _HOMES), "~/.local", "/usr/local", "/opt/homebrew")
_BUILD = f"cmake -B build && cmake --build build --target {PROGRAM}"


def find_llama_quantize(llama_cpp: str | None = None) -> Path:
    """The program in the llama.cpp folder of the argument or of LLAMA_CPP_PATH, on PATH or in a usual folder."""
    for name, folder in (("llama_cpp_path", llama_cpp), ("LLAMA_CPP_PATH", os.environ.get("LLAMA_CPP_PATH"))):
        if folder:
            program = next(_programs_in(Path(folder).expanduser()), None)
            if program is None:
                raise PalestraError(
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
        raise PalestraError(f"{needed}, which {checkout} has not built yet; build it there with: {_BUILD}")
    raise PalestraError(
        f"{needed}, which was not found on PATH nor in {', '.join(_USUAL_FOLDERS)}; "
        "set LLAMA_CPP_PATH to llama.cpp's folder, or use type q8_0"
    )


def llama_quantize(program: Path, source: Path, path: Path, type: str) -> Path:
    """Convert the 16-bit file `source` to `path` in another type."""
    try:
        with replacing(path) as partial:
            command = [str(program), str(source), str(partial), type.upper()]
            result = subprocess.run(command, capture_output=True, text=True, errors="replace")
            if result.returncode or not partial.is_file():
                lines = (result.stderr.strip() or result.stdout.strip() or "no output").splitlines()
                raise PalestraError(f"{program} could not make {type} (exit {result.returncode}): {lines[-1]}")
    except OSError as error:
        raise PalestraError(f"{program} could not be run ({error.strerror or error})") from error
    return path


def _programs_in(folder: Path) -> Iterator[Path]:
    for candidate in (folder, folder / PROGRAM, folder / "bin" / PROGRAM, folder / "build" / "bin" / PROGRAM):
        if candidate.is_file() and os.access(candidate, os.X_OK):
            yield candidate
