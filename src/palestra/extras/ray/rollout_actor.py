"""The process of one rollout actor. Nothing heavy is imported before it has answered that it runs."""

from __future__ import annotations

import sys
import sysconfig
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

from ray import cloudpickle


class RolloutActor:
    """`GroupSampler`, which it builds from a recipe, does its work."""

    def __init__(self) -> None:
        self._sampler: Any = None

    async def place(self) -> None:
        """Answers as soon as the process runs."""

    async def build(self, recipe: bytes) -> None:
        self._sampler = cloudpickle.loads(recipe)()

    async def update(self, weights: Any) -> None:
        self._sampler.update(weights)

    async def sample(self, job: bytes) -> bytes | str:
        return await self._sampler.sample(job)


_INSTALLED = ("site-packages", "dist-packages")
_ELSEWHERE = (sysconfig.get_paths()["stdlib"], str(Path(__file__).parents[2]))  # both are on every node


def dumps(value: Any) -> bytes:
    """Pickle a value, with the modules of files that are not installed: the agent file and its neighbours."""
    known = cloudpickle.list_registry_pickle_by_value()
    own = {module.__name__: module for module in list(sys.modules.values()) if _is_of_user(module)}
    with ExitStack() as added:
        for name, module in own.items():
            if name in sys.modules and name not in known:
                cloudpickle.register_pickle_by_value(module)
                added.callback(cloudpickle.unregister_pickle_by_value, module)
        return bytes(cloudpickle.dumps(value))


def _is_of_user(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    is_file = file and not file.startswith(_ELSEWHERE) and module is not sys.modules.get("__main__")
    return bool(is_file) and not any(place in str(file) for place in _INSTALLED)
