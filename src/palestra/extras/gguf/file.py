"""An open GGUF file: its metadata as Python values, its tensors as float32 arrays."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from palestra.core.errors import NotFoundError, PalestraError, UnreadableFileError, UnsupportedError, needs_extra

if TYPE_CHECKING:
    from gguf import GGUFReader

COPY_AGAIN = "download or copy it again, or give the model's Hugging Face folder"
_MAX_INT, _MAX_FLOAT = 1 << 31, 1e15  # no number of a model is larger

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class GgufFile:
    """The contents of a GGUF file; a tensor is read and dequantised on access."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Any]  # gguf's ReaderTensor by name

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def field(self, key: str, default: Any = None) -> Any:
        """A value of the architecture's own section: `field("block_count")` is `llama.block_count`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, kind: type[Number], default: float | None = None, least: float = 0) -> Number:
        """A number of the architecture's own section; raises if it is missing without a default, or out of range."""
        value = self.field(key, default)
        if not isinstance(value, int | float) or not least <= value <= (_MAX_INT if kind is int else _MAX_FLOAT):
            raise self.corrupt(f"{self.architecture}.{key} is {str(value)[:40]}, expected a number of at least {least}")
        return kind(value)

    def corrupt(self, reason: str) -> PalestraError:
        return UnreadableFileError(f"{self.path} is corrupt: {reason}; {COPY_AGAIN}")

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.tensors:
            raise self.corrupt(f"it has no tensor {name}")
        return tuple(reversed(self.tensors[name].shape.tolist()))

    def tensor(self, name: str) -> np.ndarray:
        """The tensor as float32."""
        import gguf

        shape, stored = self.shape(name), self.tensors[name]
        try:
            return np.asarray(gguf.dequantize(stored.data, stored.tensor_type), np.float32).reshape(shape)
        except NotImplementedError:
            raise UnsupportedError(
                f"{self.path}: the tensor {name} has the type {stored.tensor_type.name}, which the gguf package cannot "
                "dequantise; give a file in F16, BF16, Q8_0, Q4_K_M or another common type"
            ) from None


def require_gguf() -> None:
    """Raise if the optional gguf package is missing."""
    with needs_extra("a GGUF file", "gguf"):
        import gguf  # noqa: F401


def open_gguf(path: Path) -> GgufFile:
    """Read a file's metadata and locate its tensors; raises for a file that is missing, truncated or not GGUF."""
    if not path.is_file():
        raise NotFoundError(f"there is no file {path}; check the path of the .gguf file")
    require_gguf()
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise UnreadableFileError(f"{path} is not a GGUF file: it does not begin with GGUF; {COPY_AGAIN}")
    try:
        reader = _read(path)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        return GgufFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})
    except Exception as error:  # the gguf package raises nothing more specific
        reason = str(error).splitlines()[:1]
        raise UnreadableFileError(
            f"{path} cannot be read as GGUF: it is truncated or corrupt ({''.join(reason)}); {COPY_AGAIN}"
        ) from None


def _read(path: Path) -> GGUFReader:
    from gguf import GGUFReader, GGUFValueType

    class Reader(GGUFReader):
        """A GGUFReader that reads an array in one pass: 0.3 s for a vocabulary of 152,000 tokens instead of 15 s."""

        def _get_field_parts(self, offset: int, type: int) -> Any:
            if type != GGUFValueType.ARRAY or self.byte_order == "S":
                return super()._get_field_parts(offset, type)
            mapped = memoryview(self.data)
            item, count = struct.unpack_from("<IQ", mapped, offset)
            start = end = offset + 12
            if item == GGUFValueType.STRING:
                strings = []
                for _ in range(count):
                    start = end + 8
                    end = start + struct.unpack_from("<Q", mapped, end)[0]
                    strings.append(mapped[start:end])
                return end - offset, strings, list(range(count)), [GGUFValueType.ARRAY, GGUFValueType.STRING]
            numbers = np.frombuffer(mapped, self.gguf_scalar_to_np[GGUFValueType(item)], count, start)
            return 12 + numbers.nbytes, [numbers], [0], [GGUFValueType.ARRAY, GGUFValueType(item)]

    return Reader(path)
