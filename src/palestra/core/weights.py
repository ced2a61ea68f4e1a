"""What a learner hands to a policy: a version, and access to the tensors.

Sampler and learner may share one module on one device: then the weights are there already, and nothing is copied.
Otherwise the tensors are read by name, from memory or from a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Weights:
    """The trainable weights of a model at one version.

    >>> weights = Weights(3, read=lambda: {"lm_head.weight": tensor})   # doctest: +SKIP
    >>> policy.update(weights)
    """

    version: int
    read: Callable[[], Mapping[str, Any]]  # the named tensors, adapters only where only they are trained
    module: Any = None  # the live module that holds them, if it is in this process

    def tensors(self) -> Mapping[str, Any]:
        return self.read()

    def save(self, path: Path) -> Path:
        """Write the tensors to a safetensors file, whole or not at all; `Weights.load` reads it anywhere."""
        from safetensors.torch import save_file

        aside = path.with_name(f".{path.name}.partial")
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors().items()}
        aside.touch()
        mode = aside.stat().st_mode
        save_file(tensors, aside, metadata={"version": str(self.version)})
        aside.chmod(mode)  # by the umask: safetensors makes its files private, and another user's server reads them
        aside.rename(path)
        return path

    @classmethod
    def load(cls, path: Path) -> Weights:
        """The weights of a file that `save` wrote; tensors are read when they are asked for."""
        from safetensors import safe_open
        from safetensors.torch import load_file

        with safe_open(path, "pt") as file:
            version = int((file.metadata() or {}).get("version", 0))
        return cls(version, lambda: load_file(path))


def saved_tensors(folder: Path) -> dict[str, Any]:
    """The tensors of a folder's safetensors files; those of an adapter by their names in a module of peft."""
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    return {re.sub(r"\.lora_([AB])\.", r".lora_\1.default.", name): tensor for name, tensor in tensors.items()}
