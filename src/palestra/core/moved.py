"""Import paths of earlier releases, for modules that have moved."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

# old path -> where the module is now
MOVED = {
    "palestra.algo.distill": "palestra.extras.distill.loss",
    "palestra.agent_tools": "palestra.extras.agent_tools",
    "palestra.backends.vllm": "palestra.extras.vllm",
    "palestra.dashboard": "palestra.extras.dashboard",
    "palestra.envs.adapters": "palestra.extras.adapters",
    "palestra.envs.library": "palestra.extras.environments",
    "palestra.models.export.hub": "palestra.extras.hub.upload",
    "palestra.models.gguf": "palestra.extras.gguf",
    "palestra.train.distill": "palestra.extras.distill.teacher",
    "palestra.train.prompts": "palestra.extras.step_trainer.prompts",
    "palestra.train.step_trainer": "palestra.extras.step_trainer.trainer",
    "palestra.train.interrupt": "palestra.train.watcher",
    "palestra.trl": "palestra.extras.trl.names",
}


class MovedPaths:
    """Finds modules by their import path in earlier releases, as the same module objects."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if not name.startswith("palestra."):
            return None
        old = next((old for old in MOVED if f"{name}.".startswith(f"{old}.")), None)
        if old is None:
            return None
        return ModuleSpec(name, self, origin=name.replace(old, MOVED[old], 1))  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(str(spec.origin))
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to execute; importing has put the spec of the old path on the module."""
        assert module.__spec__ is not None
        module.__spec__ = self._specs[module.__spec__.name]


sys.meta_path.insert(0, MovedPaths())
