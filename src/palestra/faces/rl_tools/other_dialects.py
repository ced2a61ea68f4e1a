"""Environments that are written for another library run in a Python that has it."""

from __future__ import annotations

import sys
from pathlib import Path

from palestra.core.errors import PalestraError
from palestra.envs.discover import Found


def python_of(found: Found) -> Path | None:
    """The Python that can import an environment; None is ours."""
    if found.dialect != "atropos":
        return None
    from palestra.serve.atropos import cache_folder

    name = f"atropos-0.4.0-py{sys.version_info.major}.{sys.version_info.minor}"
    python = cache_folder() / name / "bin" / "python"
    if not python.is_file():
        raise PalestraError(
            f"{found.name} is written for atroposlib, which is not installed yet; install it once with: "
            f"palestra env run-atropos {found.file_path} --train.max_steps 1"
        )
    return python
