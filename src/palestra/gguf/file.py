"""A GGUF file, opened: its metadata as plain values, its tensors by name.

The reader of the gguf package takes a minute over a large vocabulary, so the header is read here; the tensors'
many forms are left to that package.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from palestra.core.errors import PalestraError

_WHAT_TO_DO = "Download or copy it again, or give a Hugging Face folder."
_STRING, _ARRAY = 8, 9
# value type -> numpy's name of it; strings and arrays are apart
_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies: its shape as numpy has it, the number of its storage form, its bytes."""

    shape: tuple[int, ...]
    type: int
    data: np.ndarray


@dataclass(frozen=True)
class GgufFile:
    """What a GGUF file holds; a tensor is read and dequantised when it is asked for."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

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
        form = gguf.GGMLQuantizationType(stored.type)
        try:
            rows = stored.data.reshape(gguf.quant_shape_to_byte_shape(stored.shape, form))
            return np.asarray(gguf.dequantize(rows, form), np.float32).reshape(stored.shape)
        except (NotImplementedError, ValueError, KeyError):
            raise PalestraError(
                f"{self.path}: the tensor {name} is stored as {form.name}, which cannot be read; "
                "give a file in F16, BF16, Q8_0, Q4_K_M or another common form"
            ) from None


def open_gguf(path: Path) -> GgufFile:
    """Read a file's metadata and find its tensors; a file that is missing, cut short or not GGUF is told by name."""
    if not path.is_file():
        raise PalestraError(f"there is no file {path}; check the path of the .gguf file")
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise PalestraError("reading a .gguf file needs the gguf package; pip install 'palestra[gguf]'") from None
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise PalestraError(f"{path} is not a GGUF file: it does not begin with GGUF. {_WHAT_TO_DO}")
        whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        metadata, tensors = _Header(whole).read()
    except (ValueError, KeyError, OverflowError, MemoryError, struct.error) as error:
        raise PalestraError(
            f"{path} cannot be read as GGUF: it is cut short or broken ({error}). {_WHAT_TO_DO}"
        ) from None
    return GgufFile(path, metadata, tensors)


class _Header:
    """The beginning of a file: key-value pairs, then the table of tensors."""

    def __init__(self, whole: mmap.mmap) -> None:
        self._whole = whole
        self._at = 4  # behind the magic word

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        version, tensor_count, pair_count = self._numbers("<IQQ")
        if version not in (2, 3):
            raise ValueError(f"version {version}, known are 2 and 3")
        metadata = {}
        for _ in range(pair_count):
            key = self._string()
            metadata[key] = self._value(self._numbers("<I")[0])
        table = [self._tensor() for _ in range(tensor_count)]
        alignment = int(metadata.get("general.alignment", 32))
        start = -(-self._at // alignment) * alignment
        return metadata, {name: self._stored(shape, form, start + offset) for name, shape, form, offset in table}

    def _numbers(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._whole, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        (length,) = self._numbers("<Q")
        return self._bytes(length).decode("utf-8", "replace")

    def _bytes(self, length: int) -> bytes:
        if length > len(self._whole) - self._at:
            raise ValueError(f"{length} bytes announced at {self._at}, the file has {len(self._whole)}")
        self._at += length
        return self._whole[self._at - length : self._at]

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._array(kind, 1)[0]
        inner, count = self._numbers("<IQ")
        if inner not in (_STRING, _ARRAY):
            return self._array(inner, count)
        return [self._value(inner) for _ in range(count)]

    def _array(self, kind: int, count: int) -> list[Any]:
        number = np.dtype(_NUMBERS[kind])
        values: list[Any] = np.frombuffer(self._bytes(count * number.itemsize), number).tolist()
        return values

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (axes,) = self._numbers("<I")
        fastest_first = self._numbers(f"<{axes}Q")
        form, offset = self._numbers("<IQ")
        return name, tuple(reversed(fastest_first)), form, offset

    def _stored(self, shape: tuple[int, ...], form: int, start: int) -> GgufTensor:
        import gguf

        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(form)]
        size = prod(shape) // block * block_bytes
        if start + size > len(self._whole):
            raise ValueError(f"a tensor would end at byte {start + size}, the file has {len(self._whole)}")
        return GgufTensor(shape, form, np.frombuffer(self._whole, np.uint8, size, start))
