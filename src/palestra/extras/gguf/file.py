"""An open GGUF file: its metadata as Python values, its tensors by name.

`gguf.GGUFReader` takes 3.4 s for the header of a file with 49,000 tokens, this reader 0.1 s. The tensors' many
quantisation types are left to the gguf package.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from palestra.core.errors import NotFoundError, PalestraError, UnreadableFileError, UnsupportedError, needs_extra

COPY_AGAIN = "download or copy it again, or give the model's Hugging Face folder"
_STRING, _ARRAY = 8, 9
_MAX_AXES = 4
_MAX_ALIGNMENT = 1 << 20
_MAX_INT, _MAX_FLOAT = 1 << 31, 1e15  # no number of a model is larger
# number of a value type -> numpy's name of it
_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}


Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class GgufTensor:
    """A tensor's shape in numpy's order, the number of its quantisation type, and its bytes in the mapped file."""

    shape: tuple[int, ...]
    type: int
    data: np.ndarray


@dataclass(frozen=True)
class GgufFile:
    """The contents of a GGUF file; a tensor is read and dequantised when it is asked for."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def field(self, key: str, default: Any = None) -> Any:
        """A value of the architecture's own section: `field("block_count")` is `llama.block_count`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def required(self, key: str) -> Any:
        value = self.field(key)
        if value is None:
            raise UnreadableFileError(f"{self.path} is incomplete: it has no {self.architecture}.{key}; {COPY_AGAIN}")
        return value

    def number(self, key: str, kind: type[Number], default: float | None = None, least: float = 0) -> Number | None:
        """A number of the architecture's own section, within what a model can have."""
        value = self.field(key, default)
        most = _MAX_INT if kind is int else _MAX_FLOAT
        if value is None:
            return None
        if not isinstance(value, int | float) or not least <= value <= most:
            raise self.corrupt(f"{self.architecture}.{key} is {str(value)[:40]}, expected a number of at least {least}")
        return kind(value)

    def required_number(self, key: str, kind: type[Number], least: float = 0) -> Number:
        return self.number(key, kind, self.required(key), least)  # type: ignore[return-value]

    def list_of(self, kind: Any, key: str) -> list[Any]:
        """A list of strings (`str`) or numbers (`int | float`), empty where the file has none."""
        value = self.metadata.get(key) or []
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise self.corrupt(f"{key} is not a list of {'strings' if kind is str else 'numbers'}")
        return value

    def corrupt(self, reason: str) -> PalestraError:
        return UnreadableFileError(f"{self.path} is corrupt: {reason}; {COPY_AGAIN}")

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.tensors:
            raise UnreadableFileError(f"{self.path} is incomplete: it has no tensor {name}; {COPY_AGAIN}")
        return self.tensors[name].shape

    def tensor(self, name: str) -> np.ndarray:
        """The tensor as float32."""
        import gguf

        shape, stored = self.shape(name), self.tensors[name]
        quantization = gguf.GGMLQuantizationType(stored.type)
        try:
            rows = stored.data.reshape(gguf.quant_shape_to_byte_shape(shape, quantization))
            return np.asarray(gguf.dequantize(rows, quantization), np.float32).reshape(shape)
        except (NotImplementedError, ValueError, KeyError):
            raise UnsupportedError(
                f"{self.path}: the tensor {name} has the type {quantization.name}, which the gguf package cannot "
                "dequantise; give a file in F16, BF16, Q8_0, Q4_K_M or another common type"
            ) from None


def require_gguf() -> None:
    """Raise where the optional gguf package is missing."""
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
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        metadata, tensors = _Header(mapped).read()
    except (ValueError, TypeError, KeyError, OverflowError, MemoryError, struct.error) as error:
        raise UnreadableFileError(
            f"{path} cannot be read as GGUF: it is truncated or corrupt ({error}); {COPY_AGAIN}"
        ) from None
    return GgufFile(path, metadata, tensors)


class _Header:
    """The beginning of a file: key-value pairs, then the table of tensors."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped = mapped
        self._offset = 4  # after the magic number

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        version, tensor_count, pair_count = self._unpack("<IQQ")
        if version not in (2, 3):
            raise ValueError(f"version {version}, supported are 2 and 3")
        metadata = {}
        for _ in range(pair_count):
            key = self._string()
            metadata[key] = self._value(self._unpack("<I")[0])
        table = [self._tensor_entry() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= _MAX_ALIGNMENT:
            raise ValueError(f"general.alignment is {str(alignment)[:40]}, expected a number such as 32")
        start = -(-self._offset // alignment) * alignment
        return metadata, {name: self._tensor(shape, type, start + offset) for name, shape, type, offset in table}

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._mapped, self._offset)
        self._offset += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        return self._bytes(length).decode("utf-8", "replace")

    def _bytes(self, length: int) -> bytes:
        if length > len(self._mapped) - self._offset:
            raise ValueError(f"{length} bytes announced at {self._offset}, the file has {len(self._mapped)}")
        self._offset += length
        return self._mapped[self._offset - length : self._offset]

    def _value(self, type: int) -> Any:
        if type == _STRING:
            return self._string()
        if type != _ARRAY:
            return self._numbers(type, 1)[0]
        item_type, count = self._unpack("<IQ")
        if item_type == _ARRAY:
            raise ValueError("an array of arrays, which no model has")
        if item_type != _STRING:
            return self._numbers(item_type, count)
        return [self._string() for _ in range(count)]

    def _numbers(self, type: int, count: int) -> list[Any]:
        if type not in _NUMBERS:
            raise ValueError(f"an unknown type of value, {type}")
        number = np.dtype(_NUMBERS[type])
        values: list[Any] = np.frombuffer(self._bytes(count * number.itemsize), number).tolist()
        return values

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (axes,) = self._unpack("<I")
        if axes > _MAX_AXES:
            raise ValueError(f"the tensor {name[:40]} has {axes} axes, expected at most {_MAX_AXES}")
        fastest_first = self._unpack(f"<{axes}Q")
        type, offset = self._unpack("<IQ")
        return name, tuple(reversed(fastest_first)), type, offset

    def _tensor(self, shape: tuple[int, ...], type: int, start: int) -> GgufTensor:
        import gguf

        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(type)]
        size = prod(shape) // block * block_bytes
        if start + size > len(self._mapped):
            raise ValueError(f"a tensor would end at byte {start + size}, the file has {len(self._mapped)}")
        return GgufTensor(shape, type, np.frombuffer(self._mapped, np.uint8, size, start))
