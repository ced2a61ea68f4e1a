"""The process of one rollout actor. Nothing heavy is imported before it has answered that it runs."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
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

    async def sample(self, job: bytes) -> dict[str, Any]:
        answer: dict[str, Any] = await self._sampler.sample(cloudpickle.loads(job))
        return answer


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
