"""Values between processes: exact, typed, and clear about what cannot be sent."""

import contextlib
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palestra.core.codec import CodecError, decode, encode, exact, exact_problem
from palestra.core.types import (
    Group,
    Lineage,
    Message,
    Problem,
    Rollout,
    SamplingParams,
    Score,
    ToolCall,
    ToolResult,
    Turn,
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
numbers = st.floats() | st.integers(-(2**63), 2**64 - 1)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
infos = st.dictionaries(texts, values, max_size=2)
calls = st.builds(ToolCall, texts, texts, infos, st.none() | texts, texts)
messages = st.builds(
    Message, st.sampled_from(["user", "assistant"]), texts, st.lists(calls, max_size=2).map(tuple), st.none() | texts
)
float32 = st.floats(width=32)


@st.composite
def turns(draw: Any) -> Turn:
    ids = draw(st.lists(st.integers(0, 2**31 - 1), max_size=4))
    if draw(st.booleans()):
        return Turn("template", ids)
    logprobs = draw(st.lists(float32, min_size=len(ids), max_size=len(ids)))
    routing = draw(st.none() | st.just(np.arange(len(ids) * 6, dtype=np.int16).reshape(len(ids), 3, 2)))
    return Turn("model", ids, logprobs, draw(st.integers(0, 99)), draw(st.sampled_from(["stop", None])), routing)  # type: ignore[arg-type]


turn_tuples = st.lists(turns(), max_size=3).map(tuple)
message_tuples = st.lists(messages, max_size=3).map(tuple)
scores = st.builds(
    Score, st.floats(), st.none() | st.booleans(), texts, st.booleans(), st.booleans(),
    st.dictionaries(texts, st.floats()), st.lists(st.floats(), max_size=2).map(tuple),
)  # fmt: skip
lineages = st.builds(Lineage, turn_tuples, message_tuples, st.just("answered"), texts)
rollouts = st.builds(
    Rollout, texts, turn_tuples, message_tuples, st.sampled_from(["answered", "failed"]),
    st.lists(st.builds(ToolResult, calls, texts, st.booleans(), st.floats()), max_size=2).map(tuple),
    st.dictionaries(texts, scores, max_size=2), st.floats(), advantages=st.none() | st.just(np.ones(3, np.float32)),
    tool_names=st.lists(texts).map(tuple), info=infos, states=st.lists(texts).map(tuple),
    lineages=st.lists(lineages, max_size=1).map(tuple),
)  # fmt: skip
groups = st.builds(
    Group, texts, st.lists(rollouts, max_size=2).map(tuple), st.dictionaries(texts, st.floats(), max_size=2)
)


def parts(value: Any) -> Any:
    """The value with its types, in a form that compares floats by their bits."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value.hex()
    if hasattr(value, "__dataclass_fields__"):
        return type(value), [parts(getattr(value, name)) for name in value.__dataclass_fields__]
    if isinstance(value, dict):
        return dict, [(parts(k), parts(v)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [parts(item) for item in value]
    return type(value), value


@settings(max_examples=60, deadline=None)
@given(groups)
def test_a_group_comes_back_exactly(group: Group) -> None:
    assert parts(decode(encode(group), Group)) == parts(group)


@pytest.mark.parametrize(
    "value",
    [
        (1, (2, [3, ()])), 2**70, -(2**64), -math.inf, {1, 2}, frozenset("a"), {(1, 2): "x", None: 1}, b"\x00",
        {"a": {"b": [1.0, 1, True]}}, [], {}, Path("runs/demo"),
    ],
)  # fmt: skip
def test_exact_values_keep_their_types(value: Any) -> None:
    assert parts(decode(encode(exact(value)))) == parts(value)


def test_a_problem_comes_back_with_its_row_as_it_was() -> None:
    problem = Problem("p", (Message("user", "Hi"),), {"n": (1,)}, {"a": None, "b": {1: {2**80}}})
    assert parts(decode(encode(exact_problem(problem)), Problem)) == parts(problem)
    assert decode(encode(SamplingParams(8, 0.7, stop=("x",), seed=2**60)), SamplingParams).stop == ("x",)


def test_arrays_keep_their_dtype_and_shape() -> None:
    array = np.arange(6, dtype=np.float16).reshape(2, 3).T
    assert parts(decode(encode({"x": array}))["x"]) == parts(np.ascontiguousarray(array))


def test_scalars_of_numpy_are_sent_as_plain_values() -> None:
    score = decode(encode(Score(np.float32(0.5), np.bool_(True))), Score)  # type: ignore[arg-type]
    assert (score.value, score.passed) == (0.5, True)
    assert type(score.value) is float


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"handle": threading.Lock()}, r"^\['handle'\] is a lock, which cannot be sent to another process$"),
        (Problem("p", "x", row={"rows": [1, {"f": len}]}), r"^\.row\['rows'\]\[1\]\['f'\] is a builtin_function"),
        (
            Group("g", (Rollout("g", (), (), "failed", info={"x": object()}),)),
            r"^\.rollouts\[0\].info\['x'\] is an object",
        ),
        (object(), "^an object cannot be sent"),
        (np.array([None]), "^a[n]? ndarray cannot be sent"),
    ],
)
def test_what_cannot_be_sent_is_named(value: Any, text: str) -> None:
    with pytest.raises(CodecError, match=text):
        encode(value)


def test_what_holds_itself_cannot_be_sent() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(CodecError, match="cannot be sent"):
        encode(endless)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CodecError):
        decode(data, Group)


@settings(max_examples=200, deadline=None)
@given(groups, st.data())
def test_damaged_bytes_make_a_group_or_a_codec_error(group: Group, data: Any) -> None:
    damaged = bytearray(encode(group))
    for _ in range(3):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CodecError):
        assert isinstance(decode(bytes(damaged), Group), Group)


def test_a_value_of_another_type_is_refused() -> None:
    with pytest.raises(CodecError, match="Expected `object`, got `str`"):
        decode(encode("x"), Turn)
    with pytest.raises(CodecError, match="Expected `int`"):
        decode(encode([1, "2"]), list[int])
