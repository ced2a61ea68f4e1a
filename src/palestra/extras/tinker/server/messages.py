"""The protobuf messages: training data, its results, and samples. Arrays are raw little-endian bytes.

Messages are read and written by the classes that the Tinker SDK generates from its `tinker_public.proto`.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from palestra.core.errors import InputError, UnsupportedError, needs_extra
from palestra.core.types import Array, Turn

_MALFORMED = "the body is not a valid protobuf message of the Tinker SDK"
EMPTY_LOGPROB = -99999.0  # of a cell of a top-k matrix that holds nothing


with needs_extra("palestra tinker", "tinker"):
    pb: Any = importlib.import_module("tinker.proto.tinker_public_pb2")
_DTYPES: dict[int, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_BFLOAT16: np.dtype("<u2"),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array, dense, or as the listed cells of a matrix: `cells` [n] says where each value stands, row by row."""

    values: Array
    shape: tuple[int, ...]
    cells: Array | None = None  # [n] flat places, ascending; None: all of them

    @property
    def places(self) -> Array:
        return np.arange(len(self.values)) if self.cells is None else self.cells

    @property
    def rows(self) -> Array:
        return self.places // (self.shape[1] if len(self.shape) == 2 else 1)


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


class TopK(NamedTuple):
    """The most likely tokens of each position, best first."""

    token_ids: Array  # [N, K] int32
    logprobs: Array  # [N, K] float32


def parse_request(body: bytes) -> Any:
    from google.protobuf.message import DecodeError

    try:
        return pb.ForwardBackwardRequest.FromString(body)
    except DecodeError:
        raise InputError(f"{_MALFORMED}: it cannot be parsed") from None


def read_forward_backward(body: bytes) -> ForwardBackwardRequest:
    request = parse_request(body)
    config: dict[str, float | str] = dict(request.loss_fn_config)
    for key, value in request.loss_fn_config_v2.items():
        if kind := value.WhichOneof("value"):
            config[key] = getattr(value, kind)
    data = []
    for datum in request.data:
        tokens: list[Array] = [np.empty(0, np.int32)]
        for chunk in datum.model_input:
            kind = chunk.WhichOneof("chunk")
            if kind != "encoded_text":  # None for a kind of a newer SDK
                raise UnsupportedError(f"model_input holds a chunk of kind {kind}; this server takes text tokens alone")
            tokens.append(_array(chunk.encoded_text.tokens, np.dtype("<i4")))
        inputs = {key: _read_tensor(key, value) for key, value in datum.loss_fn_inputs.items()}
        data.append(Datum(np.concatenate(tokens), inputs))
    return ForwardBackwardRequest(request.model_id, request.seq_id, data, request.loss_fn, config, request.forward_only)


def write_outputs(logprobs: Sequence[Array], metrics: Mapping[str, float]) -> bytes:
    """A ForwardBackwardOutput: the log-probabilities of each row's targets, [T] or [T, K], and the metrics."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    for _, same_shape in itertools.groupby(logprobs, key=lambda row: row.shape[1:]):  # one record holds neighbours
        rows = [np.ascontiguousarray(row, dtype="<f4") for row in same_shape]
        tensor = pb.BatchedTensor(
            data=b"".join(row.tobytes() for row in rows),
            offsets=np.cumsum([0, *(row.nbytes for row in rows)]).astype("<i8").tobytes(),
            dtype=pb.DTYPE_FLOAT32,
            trailing_shape=rows[0].shape[1:],
        )
        message.loss_fn_outputs.add(fields={"logprobs": tensor}, num_datums=len(rows))
    return bytes(message.SerializeToString())


def write_sample(
    turns: Sequence[Turn],
    tops: Sequence[TopK | None],  # of each turn
    prompt_logprobs: Array | None = None,  # [T] float32, NaN where none was computed
    prompt_top: TopK | None = None,
    targets: Tensor | None = None,
) -> bytes:
    """A SampleResponse."""
    message = pb.SampleResponse(
        prompt_logprobs=None if prompt_logprobs is None else prompt_logprobs.astype("<f4").tobytes(),
        topk_prompt_logprobs=_topk(prompt_top),
        target_prompt_logprobs=None if targets is None else _tensor(targets),
    )
    for turn, top in zip(turns, tops, strict=True):
        message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if turn.finish == "stop" else pb.STOP_REASON_LENGTH,
            tokens=turn.token_ids.astype("<i4").tobytes(),
            logprobs=turn.logprobs.astype("<f4").tobytes(),
            topk_sampled_logprobs=_topk(top),
        )
    return bytes(message.SerializeToString())


def make_tensor(name: str, values: Array, shape: Sequence[int], csr: Sequence[Array] = ()) -> Tensor:
    """A tensor that a client sent; `csr` has the row and column indices of a sparse one. InputError if they differ."""
    size = tuple(shape) or (len(values),)
    if min(size, default=0) < 0 or len(size) > 2:
        raise InputError(f"{name} has the shape {list(shape)}; expected [N] or [N, K]")
    if not csr:
        if math.prod(size) != len(values):
            raise InputError(f"{name} has {len(values)} values and the shape {list(size)}")
        return Tensor(values, size)
    crow, col = csr
    counts = np.diff(crow)
    whole = len(size) == 2 and len(crow) == size[0] + 1 and len(counts) and crow[0] == 0 and crow[-1] == len(col)
    if not whole or (counts < 0).any() or (len(col) and (col.min() < 0 or col.max() >= size[1])):
        raise InputError(f"the sparse indices do not describe a matrix of shape {list(size)}")
    cells: Array = np.repeat(np.arange(size[0]), counts) * size[1] + col
    if (np.diff(cells) <= 0).any():
        raise InputError("the cells of a sparse matrix are not in ascending order, each once")
    if len(cells) != len(values):
        raise InputError(f"{name} has {len(values)} values and {len(cells)} sparse indices")
    return Tensor(values, size, cells)


def _read_tensor(name: str, tensor: Any) -> Tensor:
    if tensor.dtype not in _DTYPES:
        raise InputError(f"loss_fn_inputs[{name!r}] has data type {tensor.dtype}, which is none that the SDK sends")
    is_sparse, sparse = tensor.WhichOneof("encoding") == "sparse_csr", tensor.sparse_csr
    values = _array(sparse.values if is_sparse else tensor.dense, _DTYPES[tensor.dtype])
    if tensor.dtype == pb.DTYPE_BFLOAT16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    csr = [_array(part, np.dtype("<i8")) for part in (sparse.crow_indices, sparse.col_indices)] if is_sparse else []
    return make_tensor(f"loss_fn_inputs[{name!r}]", values, list(tensor.shape), csr)


def _array(data: bytes, dtype: np.dtype[Any]) -> Array:
    if len(data) % dtype.itemsize:
        raise InputError(f"{_MALFORMED}: an array of {dtype} has {len(data)} bytes")
    return np.frombuffer(data, dtype)


def _tensor(tensor: Tensor) -> Any:
    is_int = tensor.values.dtype.kind == "i"
    data = tensor.values.astype("<i8" if is_int else "<f4").tobytes()
    message = pb.Tensor(dtype=pb.DTYPE_INT64 if is_int else pb.DTYPE_FLOAT32, shape=tensor.shape)
    if tensor.cells is None:
        message.dense = data
        return message
    counts = np.bincount(tensor.rows, minlength=tensor.shape[0])
    crow, col = np.cumsum([0, *counts]).astype("<i8"), (tensor.cells % tensor.shape[1]).astype("<i8")
    message.sparse_csr.values = data
    message.sparse_csr.crow_indices, message.sparse_csr.col_indices = crow.tobytes(), col.tobytes()
    return message


def _topk(top: TopK | None) -> Any:
    if top is None:
        return None
    length, k = top.token_ids.shape
    ids, logprobs = top.token_ids.astype("<i4").tobytes(), top.logprobs.astype("<f4").tobytes()
    return pb.TopkLogprobs(token_ids=ids, logprobs=logprobs, k=k, length=length)
