"""Values as bytes, for another process of ours or for a journal: `encode`, and `decode` by the type that is expected.

The bytes are msgpack. Decoding makes plain data and the dataclasses that the type names, and runs no code that the
bytes name. Floats are exact to the bit; arrays keep their dtype and shape. Where a type says Any, a tuple comes back as
a list, unless the value was made `exact`.

    >>> from palestra.core.types import Turn
    >>> turn = decode(encode(Turn("model", [7], [-0.5], 3)), Turn)
    >>> turn.logprobs.tolist(), turn.versions.tolist()
    ([-0.5], [3])
    >>> encode({"handle": object()})
    Traceback (most recent call last):
    palestra.core.codec.CodecError: ['handle'] is an object, which cannot be sent to another process
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from msgspec import DecodeError, msgpack
from msgspec.msgpack import Ext

from palestra.core.errors import InputError, text_of
from palestra.core.types import Problem

# types of msgpack extensions; arrays of one dimension have that of their dtype
_TUPLE, _SET, _PAIRS, _INT, _ARRAY, _PATH = range(1, 7)
_DTYPES = {ord(char): np.dtype(char) for char in "?bBhHiIlLqQefd"}  # that arrays may have


class CodecError(InputError):
    """A value that cannot be sent to another process, or bytes that do not hold what is expected."""


def encode(value: Any) -> bytes:
    """The value as bytes; CodecError with the name of the part that cannot be sent."""
    try:
        return _ENCODER.encode(value)
    except Exception:
        path, part = _unsendable(value)
    name = type(part).__qualname__
    a_name = f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
    raise CodecError(f"{f'{path} is {a_name}, which' if path else a_name} cannot be sent to another process")


def decode(data: bytes | memoryview, kind: Any = Any) -> Any:
    """The value of such bytes; CodecError unless it is of this type: a class, a union, list[Turn], …"""
    try:
        return _decoder(kind).decode(data)
    except (DecodeError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise CodecError(f"the message from another process does not hold what is expected: {text_of(error)}") from None


def exact(value: Any) -> Any:
    """Plain data of a user's, so that tuples, sets, large integers and all keys of a dict come back as they are."""
    kind = type(value)
    if kind is dict:
        if all(type(key) is str for key in value):
            return {key: exact(item) for key, item in value.items()}
        return Ext(_PAIRS, encode([[exact(key), exact(item)] for key, item in value.items()]))
    if kind is list:
        return [exact(item) for item in value]
    if kind is tuple:
        return Ext(_TUPLE, encode([exact(item) for item in value]))
    if kind in (set, frozenset):
        return Ext(_SET, encode([kind is set, [exact(item) for item in value]]))
    if kind is int and not -(2**63) <= value < 2**64:
        return Ext(_INT, str(value).encode())
    return value


def exact_problem(problem: Problem) -> Problem:
    """A problem whose row and expected answer come back as they are. It is good for `encode` alone."""
    return replace(problem, expect=exact(problem.expect), row=exact(dict(problem.row)))


def _extension(value: Any) -> Any:
    """What msgpack has no form for."""
    if type(value) is np.ndarray and (code := ord(value.dtype.char)) in _DTYPES:
        if value.ndim == 1:
            return Ext(code, value.tobytes())
        return Ext(_ARRAY, encode([code, list(value.shape), value.tobytes()]))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, PurePath):
        return Ext(_PATH, str(value).encode())
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError


def _of_extension(code: int, data: memoryview) -> Any:
    if (dtype := _DTYPES.get(code)) is not None:
        return np.frombuffer(bytes(data), dtype)
    if code == _TUPLE:
        return tuple(decode(data))
    if code == _SET:
        is_set, items = decode(data)
        return set(items) if is_set else frozenset(items)
    if code == _PAIRS:
        return dict(decode(data))
    if code == _INT:
        return int(bytes(data))
    if code == _PATH:
        return Path(bytes(data).decode())
    if code != _ARRAY:
        raise TypeError(f"there is no extension {code}")
    code, shape, content = decode(data, tuple[int, list[int], bytes])
    return np.frombuffer(content, _DTYPES[code]).reshape(shape)


def _of_type(kind: Any, value: Any) -> Any:
    if not isinstance(value, getattr(kind, "__origin__", kind)):
        raise TypeError(f"expected {kind}, got {type(value).__qualname__}")
    return value


@cache
def _decoder(kind: Any) -> msgpack.Decoder[Any]:
    return msgpack.Decoder(kind, dec_hook=_of_type, ext_hook=_of_extension)


_ENCODER = msgpack.Encoder(enc_hook=_extension)


def _unsendable(value: Any, levels: int = 20) -> tuple[str, Any]:
    """The path to the innermost part of a value that cannot be encoded, and this part; it may hold itself."""
    parts: Iterator[tuple[str, Any]] = iter(())
    if is_dataclass(value):
        parts = ((f".{field.name}", getattr(value, field.name)) for field in fields(value))
    elif isinstance(value, Mapping):
        parts = ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        parts = ((f"[{i}]", item) for i, item in enumerate(value))
    for name, part in parts if levels else ():
        try:
            _ENCODER.encode(part)
        except Exception:
            path, innermost = _unsendable(part, levels - 1)
            return name + path, innermost
    return "", value
