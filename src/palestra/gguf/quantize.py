"""Types of GGUF that only llama.cpp itself can make, through its `llama-quantize`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from palestra.core.errors import PalestraError

PROGRAM = "llama-quantize"
QUANTIZED = tuple(
    "q4_0 q4_1 q5_0 q5_1 q2_k q2_k_s q3_k q3_k_s q3_k_m q3_k_l q4_k q4_k_s q4_k_m q5_k q5_k_s q5_k_m q6_k "
    "tq1_0 tq2_0 iq3_xs iq3_s iq3_m iq3_xxs iq4_nl iq4_xs".split()
)
_USUAL_PLACES = ("~/llama.cpp", "~/.local", "/opt/llama.cpp", "/usr/local", "/opt/homebrew", "llama.cpp")


def find_llama_quantize(llama_cpp: str | None = None) -> Path:
    """The program of a llama.cpp given by argument, by LLAMA_CPP_PATH, on PATH or in one of the usual places."""
    for name, place in (("llama_cpp_path", llama_cpp), ("LLAMA_CPP_PATH", os.environ.get("LLAMA_CPP_PATH"))):
        if place:
            found = next(_programs_in(Path(place).expanduser()), None)
            if found is None:
                raise PalestraError(
                    f"{name}={place} has no {PROGRAM} (looked in it, in bin and in build/bin); build it"
                )
            return found
    if on_path := shutil.which(PROGRAM):
        return Path(on_path)
    for place in _USUAL_PLACES:
        if found := next(_programs_in(Path(place).expanduser()), None):
            return found
    raise PalestraError(
        f"types other than f32, f16, bf16 and q8_0 need llama.cpp's {PROGRAM}, which was not found on PATH nor in "
        f"{', '.join(_USUAL_PLACES)}; set LLAMA_CPP_PATH to llama.cpp's folder, or use type q8_0"
    )


def quantize(program: Path, whole: Path, path: Path, type: str) -> Path:
    """Turn the 16-bit file `whole` into `path`, of another type; written aside and renamed."""
    aside = path.with_name(f".{path.name}.partial")
    try:
        done = subprocess.run([program, whole, aside, type.upper()], capture_output=True, text=True, errors="replace")
        if done.returncode or not aside.is_file():
            lines = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()
            raise PalestraError(f"{program} could not make {type} (exit {done.returncode}): {lines[-1]}")
        aside.replace(path)
    except OSError as error:
        raise PalestraError(f"{program} could not be run ({error.strerror or error})") from error
    finally:
        aside.unlink(missing_ok=True)
    return path


def _programs_in(place: Path) -> Iterator[Path]:
    for candidate in (place, place / PROGRAM, place / "bin" / PROGRAM, place / "build" / "bin" / PROGRAM):
        if candidate.is_file() and os.access(candidate, os.X_OK):
            yield candidate
