"""A GGUF file, opened: its metadata as plain values, its tensors by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palestra.core.errors import PalestraError

if TYPE_CHECKING:
    import numpy as np

_MAGIC = b"GGUF"
_WHAT_TO_DO = "Download or copy it again, or give a Hugging Face folder."


@dataclass(frozen=True)
class GgufFile:
    """What a GGUF file holds; a tensor is read and dequantised when it is asked for."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Any]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def own(self, key: str, default: Any = None) -> Any:
        """A value of the architecture's own section: `own("block_count")` is `llama.block_count`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def needed(self, key: str) -> Any:
        """The same, of a value without which nothing can be built."""
        value = self.own(key)
        if value is None:
            raise PalestraError(f"{self.path} has no {self.architecture}.{key}, so it is not whole. {_WHAT_TO_DO}")
        return value

    def tensor(self, name: str) -> np.ndarray:
        """The tensor as float32."""
        import gguf

        stored = self.tensors[name]
        try:
            return gguf.dequantize(stored.data, stored.tensor_type)
        except (NotImplementedError, ValueError, KeyError):
            raise PalestraError(
                f"{self.path}: the tensor {name} is stored as {stored.tensor_type.name}, which cannot be read; "
                "give a file in F16, BF16, Q8_0, Q4_K_M or another common form"
            ) from None


def open_gguf(path: Path) -> GgufFile:
    """Read a file's metadata and find its tensors; a file that is missing, cut short or not GGUF is told by name."""
    if not path.is_file():
        raise PalestraError(f"there is no file {path}; check the path of the .gguf file")
    try:
        import gguf
    except ImportError:
        raise PalestraError("reading a .gguf file needs the gguf package; pip install 'palestra[gguf]'") from None
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise PalestraError(f"{path} is not a GGUF file: it does not begin with GGUF. {_WHAT_TO_DO}")
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # whatever broken bytes make of the reader
        raise PalestraError(
            f"{path} cannot be read as GGUF: it is cut short or broken ({type(error).__name__}: {error}). {_WHAT_TO_DO}"
        ) from error
    return GgufFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})
