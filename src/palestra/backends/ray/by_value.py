"""What a user's files define, pickled whole, so that a process on another machine needs none of these files."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ray import cloudpickle

_INSTALLED = ("site-packages", "dist-packages")
_ELSEWHERE = (sysconfig.get_paths()["stdlib"], str(Path(__file__).parents[2]))  # both are on every node


def dumps(value: Any) -> bytes:
    with _by_value(_user_modules()):
        return bytes(cloudpickle.dumps(value))


def _user_modules() -> list[ModuleType]:
    """The modules of files that are not installed: the agent file, the environment, their neighbours."""
    files = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
    own = [name for name, file in files.items() if file and not file.startswith(_ELSEWHERE) and name != "__main__"]
    return [sys.modules[name] for name in own if not any(place in str(files[name]) for place in _INSTALLED)]


@contextmanager
def _by_value(modules: list[ModuleType]) -> Iterator[None]:
    known = cloudpickle.list_registry_pickle_by_value()
    added = [module for module in modules if module.__name__ in sys.modules and module.__name__ not in known]
    for module in added:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in added:
            cloudpickle.unregister_pickle_by_value(module)
