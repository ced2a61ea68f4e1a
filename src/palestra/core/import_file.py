"""A user's Python file as a module; an error in it is reported with its line number."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType

from palestra.core.errors import PalestraError

_importing: list[str] = []  # files that are being imported, as their users named them


def refuse_in_import(what: str) -> None:
    """Raise where a file that the command line reads would train or score by itself, too."""
    if _importing:
        raise PalestraError(
            f"{what} is called while {_importing[-1]} is read. "
            'Put the call below `if __name__ == "__main__":`, or run the file with python'
        )


def import_file(path: Path, label: str, expected: str) -> ModuleType:
    """Import a file by its path. `label` is how the user named it; `expected` says what it should define."""
    name = f"palestra_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PalestraError(f"{label} is not a Python file; give one that ends in .py. {expected}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # the file may import its neighbours
    _importing.append(label)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise PalestraError(f"{label}{_line(error, path)}: {_reason(error)}") from error
    finally:
        _importing.pop()
    return module


def _line(error: Exception, path: Path) -> str:
    """Where in the file itself it happened, even if the error came from code that the file called."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f", line {error.lineno}"
    own = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    return f", line {own[-1]}" if own else ""


def _reason(error: Exception) -> str:
    """Our errors speak for themselves; of others the kind is worth knowing."""
    if isinstance(error, PalestraError):
        return str(error)
    return f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
