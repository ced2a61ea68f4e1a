"""What travels as protobuf: training data and its results, samples. Arrays are raw little-endian bytes.

The field numbers are those of `tinker_public.proto`; a test compares both ends with the SDK's own classes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from palestra.core.errors import PalestraError
from palestra.core.types import Array, Turn
from palestra.servers.tinker.protobuf import (
    as_bytes,
    as_float,
    as_int,
    as_text,
    block,
    double,
    integer,
    integers,
    malformed,
    read_fields,
    read_varints,
)

_FLOAT32, _INT64, _INT32, _BFLOAT16 = 1, 2, 3, 4
_DTYPES: dict[int, np.dtype[Any]] = {
    _FLOAT32: np.dtype("<f4"),
    _INT64: np.dtype("<i8"),
    _INT32: np.dtype("<i4"),
    _BFLOAT16: np.dtype("<u2"),
}
_EMPTY = memoryview(b"")
EMPTY_LOGPROB = -99999.0  # of a cell of a top-k matrix that holds nothing


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array, dense, or as the listed cells of a matrix: `cells` [n] says where each value stands, row by row."""

    values: Array
    shape: tuple[int, ...]
    cells: Array | None = None  # [n] flat places, ascending; None: all of them

    @property
    def places(self) -> Array:
        return np.arange(len(self.values)) if self.cells is None else self.cells


@dataclass(frozen=True, slots=True)
class Datum:
    """One row: input tokens, and what the loss reads. Input position i predicts `target_tokens[i]`."""

    token_ids: Array  # [T] int32
    inputs: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class ForwardBackwardRequest:
    model_id: str
    seq_id: int
    data: Sequence[Datum]
    loss_fn: str
    loss_fn_config: Mapping[str, float | str] = field(default_factory=dict)
    forward_only: bool = False


@dataclass(frozen=True, slots=True)
class TopK:
    """The most likely tokens of each position, best first."""

    token_ids: Array  # [N, K] int32
    logprobs: Array  # [N, K] float32


@dataclass(frozen=True, slots=True)
class SampleResponse:
    turns: Sequence[Turn] = ()
    topk: Sequence[TopK | None] = ()
    prompt_logprobs: Array | None = None  # [T] float32, NaN where none was computed
    prompt_topk: TopK | None = None
    target_logprobs: Tensor | None = None


def read_forward_backward(body: bytes) -> ForwardBackwardRequest:
    model_id = loss_fn = ""
    seq_id, forward_only = 0, False
    data: list[Datum] = []
    numbers: dict[str, float | str] = {}
    values: dict[str, float | str] = {}
    for number, value in read_fields(memoryview(body)):
        match number:
            case 1:
                model_id = as_text(value)
            case 2:
                seq_id = as_int(value)
            case 3:
                data.append(_read_datum(as_bytes(value)))
            case 4:
                loss_fn = as_text(value)
            case 5:
                key, entry = _read_entry(as_bytes(value))
                numbers[key] = as_float(entry)
            case 6:
                forward_only = bool(as_int(value))
            case 7:
                key, entry = _read_entry(as_bytes(value))
                for kind, content in read_fields(as_bytes(entry)):
                    values[key] = as_float(content) if kind == 1 else as_text(content)
    return ForwardBackwardRequest(model_id, seq_id, data, loss_fn, {**numbers, **values}, forward_only)


def write_forward_backward(request: ForwardBackwardRequest) -> bytes:
    """The client's side, for programs that do without the SDK."""
    parts = [block(1, request.model_id), integer(2, request.seq_id)]
    for datum in request.data:
        text = block(1, block(1, datum.token_ids.astype("<i4").tobytes()))
        entries = [block(2, block(1, key) + block(2, _tensor(value))) for key, value in datum.inputs.items()]
        parts.append(block(3, block(1, text) + b"".join(entries)))
    parts.append(block(4, request.loss_fn))
    for key, value in request.loss_fn_config.items():
        parts.append(block(5, block(1, key) + double(2, float(value))))
    return b"".join([*parts, integer(6, int(request.forward_only))])


def write_outputs(logprobs: Sequence[Array], metrics: Mapping[str, float]) -> bytes:
    """A ForwardBackwardOutput: the log-probabilities of each row's targets, [T] or [T, K], and the metrics."""
    records = []
    for start, end in _runs_of_one_shape(logprobs):
        rows = [np.ascontiguousarray(row, dtype="<f4") for row in logprobs[start:end]]
        offsets = np.cumsum([0, *(row.nbytes for row in rows)]).astype("<i8")
        tensor = block(1, b"".join(row.tobytes() for row in rows)) + block(2, offsets.tobytes())
        tensor += integer(3, _FLOAT32) + integers(4, rows[0].shape[1:])
        records.append(block(2, block(2, block(1, "logprobs") + block(2, tensor)) + integer(3, len(rows))))
    entries = [block(3, block(1, name) + double(2, value)) for name, value in metrics.items()]
    return b"".join([block(1, "ArrayRecord"), *records, *entries])


def write_sample(response: SampleResponse) -> bytes:
    parts = []
    for turn, top in zip(response.turns, response.topk or [None] * len(response.turns), strict=True):
        sequence = integer(1, 0 if turn.finish == "stop" else 1)
        sequence += block(2, turn.token_ids.astype("<i4").tobytes()) + block(3, turn.logprobs.astype("<f4").tobytes())
        parts.append(block(1, sequence + (b"" if top is None else block(4, _topk(top)))))
    if response.prompt_logprobs is not None:
        parts.append(block(2, response.prompt_logprobs.astype("<f4").tobytes()))
    if response.prompt_topk is not None:
        parts.append(block(3, _topk(response.prompt_topk)))
    if response.target_logprobs is not None:
        parts.append(block(5, _tensor(response.target_logprobs)))
    return b"".join(parts)


def csr_cells(crow: Array, col: Array, shape: tuple[int, ...]) -> Array:
    """The flat places of the cells that a CSR matrix lists; PalestraError where the indices are no matrix's."""
    counts = np.diff(crow)
    whole = len(shape) == 2 and len(crow) == shape[0] + 1 and len(counts) and crow[0] == 0 and crow[-1] == len(col)
    if not whole or (counts < 0).any() or (len(col) and (col.min() < 0 or col.max() >= shape[1])):
        raise PalestraError(f"the sparse indices do not describe a matrix of shape {list(shape)}")
    cells: Array = np.repeat(np.arange(shape[0]), counts) * shape[1] + col
    if (np.diff(cells) <= 0).any():
        raise PalestraError("the cells of a sparse matrix are not in ascending order, each once")
    return cells


def _read_datum(data: memoryview) -> Datum:
    tokens: list[Array] = []
    inputs: dict[str, Tensor] = {}
    for number, value in read_fields(data):
        if number == 1:
            tokens.append(_read_chunk(as_bytes(value)))
        elif number == 2:
            key, entry = _read_entry(as_bytes(value))
            inputs[key] = _read_tensor(key, as_bytes(entry))
    return Datum(np.concatenate(tokens) if tokens else np.empty(0, np.int32), inputs)


def _read_chunk(data: memoryview) -> Array:
    for number, value in read_fields(data):
        if number != 1:
            kind = {2: "an image", 3: "audio"}.get(number, f"a chunk of kind {number}")
            raise PalestraError(f"model_input holds {kind}; this server takes text tokens alone")
        for inner, content in read_fields(as_bytes(value)):
            if inner == 1:
                return _array(as_bytes(content), np.dtype("<i4"))
    return np.empty(0, np.int32)


def _read_entry(data: memoryview) -> tuple[str, int | float | memoryview]:
    fields = dict(read_fields(data))
    return as_text(fields.get(1, _EMPTY)), fields.get(2, _EMPTY)


def _read_tensor(name: str, data: memoryview) -> Tensor:
    dense, sparse, kind, shape = _EMPTY, None, 0, []
    for number, value in read_fields(data):
        match number:
            case 1:
                dense = as_bytes(value)
            case 2:
                sparse = {key: as_bytes(part) for key, part in read_fields(as_bytes(value))}
            case 3:
                kind = as_int(value)
            case 4:
                shape += read_varints(value)
    if kind not in _DTYPES:
        raise PalestraError(f"loss_fn_inputs[{name!r}] has data type {kind}, which is none that the SDK sends")
    values = _array(dense if sparse is None else sparse.get(1, _EMPTY), _DTYPES[kind])
    if kind == _BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    size = tuple(shape) or (len(values),)
    if min(size, default=0) < 0 or len(size) > 2:
        raise PalestraError(f"loss_fn_inputs[{name!r}] has the shape {shape}; expected [N] or [N, K]")
    if sparse is None:
        if int(np.prod(size, dtype=object)) != len(values):
            raise PalestraError(f"loss_fn_inputs[{name!r}] has {len(values)} values and the shape {shape}")
        return Tensor(values, size)
    crow, col = (_array(sparse.get(part, _EMPTY), np.dtype("<i8")) for part in (2, 3))
    cells = csr_cells(crow, col, size)
    if len(cells) != len(values):
        raise PalestraError(f"loss_fn_inputs[{name!r}] has {len(values)} values and {len(cells)} sparse indices")
    return Tensor(values, size, cells)


def _array(data: memoryview, dtype: np.dtype[Any]) -> Array:
    if len(data) % dtype.itemsize:
        raise malformed(f"an array of {dtype} has {len(data)} bytes")
    return np.frombuffer(data, dtype)


def _tensor(tensor: Tensor) -> bytes:
    whole = tensor.values.dtype.kind == "i"
    data = tensor.values.astype("<i8" if whole else "<f4").tobytes()
    kind = integer(3, _INT64 if whole else _FLOAT32) + integers(4, tensor.shape)
    if tensor.cells is None:
        return block(1, data) + kind
    rows = np.bincount(tensor.cells // tensor.shape[1], minlength=tensor.shape[0])
    crow, col = np.cumsum([0, *rows]).astype("<i8"), (tensor.cells % tensor.shape[1]).astype("<i8")
    return block(2, block(1, data) + block(2, crow.tobytes()) + block(3, col.tobytes())) + kind


def _topk(top: TopK) -> bytes:
    length, k = top.token_ids.shape
    ids, logprobs = top.token_ids.astype("<i4").tobytes(), top.logprobs.astype("<f4").tobytes()
    return block(1, ids) + block(2, logprobs) + integer(3, k) + integer(4, length)


def _runs_of_one_shape(rows: Sequence[Array]) -> list[tuple[int, int]]:
    """Rows that follow each other and agree in all but their length: one record holds them."""
    bounds = [i for i in range(1, len(rows)) if rows[i].shape[1:] != rows[i - 1].shape[1:]]
    edges = [0, *bounds, len(rows)] if rows else []
    return list(itertools.pairwise(edges))
