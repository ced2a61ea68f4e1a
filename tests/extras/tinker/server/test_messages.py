"""The arrays in protobuf messages, read from and written for the SDK."""

from typing import Any

import numpy as np
import pytest

from palestra.core.errors import PalestraError
from palestra.core.types import Turn
from palestra.extras.tinker.server import messages, requests

tinker = pytest.importorskip("tinker")
from tinker.proto import request_conv, response_conv  # noqa: E402
from tinker.proto import tinker_public_pb2 as pb  # noqa: E402
from tinker.types import ForwardBackwardInput, ForwardBackwardRequest  # noqa: E402

types = tinker.types


def encoded(data: list[Any], loss_fn: str = "ppo", config: dict[str, Any] | None = None) -> bytes:
    content = ForwardBackwardInput(data=data, loss_fn=loss_fn, loss_fn_config=config)
    request = ForwardBackwardRequest(model_id="s:train:0", seq_id=3, forward_backward_input=content)
    return bytes(request_conv.forward_backward_request_to_proto(request).SerializeToString())


def request_with(**chunk: Any) -> bytes:
    request = pb.ForwardBackwardRequest(data=[pb.Datum(model_input=[pb.Chunk(**chunk)])])
    return bytes(request.SerializeToString())


def datum(**inputs: Any) -> Any:
    return types.Datum(model_input=types.ModelInput.from_ints([5, 6, 70000]), loss_fn_inputs=inputs)


def test_a_request_of_the_sdk_is_read_as_it_was_written() -> None:
    rows = [datum(target_tokens=[6, 70000, 1], advantages=[0.0, 0.5, -0.25])]
    found = messages.read_forward_backward(encoded(rows * 2, config={"clip_low_threshold": 0.9}))
    assert (found.model_id, found.seq_id, found.loss_fn, found.forward_only) == ("s:train:0", 3, "ppo", False)
    assert found.loss_fn_config == {"clip_low_threshold": 0.9}
    assert len(found.data) == 2
    assert found.data[1].token_ids.tolist() == [5, 6, 70000]
    assert found.data[1].inputs["target_tokens"].values.tolist() == [6, 70000, 1]
    assert found.data[1].inputs["advantages"].values.tolist() == [0.0, 0.5, -0.25]


def test_sparse_and_two_dimensional_targets_are_read_with_their_places() -> None:
    sparse = types.TensorData(
        data=[7, 8, 9], dtype="int64", shape=[3, 2], sparse_crow_indices=[0, 2, 2, 3], sparse_col_indices=[0, 1, 1]
    )
    dense = types.TensorData(data=[[1, 2], [3, 4], [5, 6]], dtype="int64", shape=[3, 2])
    found = messages.read_forward_backward(encoded([datum(target_tokens=sparse), datum(target_tokens=dense)]))
    first, second = (row.inputs["target_tokens"] for row in found.data)
    assert (first.values.tolist(), first.shape, first.places.tolist()) == ([7, 8, 9], (3, 2), [0, 1, 5])
    assert (second.values.tolist(), second.shape) == ([1, 2, 3, 4, 5, 6], (3, 2))


def test_outputs_of_any_shape_reach_the_sdk() -> None:
    rows = [np.array([-1.0, -2.0]), np.array([-3.0]), np.array([[-1.0, -2.0]])]
    found = response_conv.deserialize_forward_backward_output(messages.write_outputs(rows, {"loss:sum": 2.5}))
    assert found.metrics == {"loss:sum": 2.5}
    assert [out["logprobs"].tolist() for out in found.loss_fn_outputs] == [[-1.0, -2.0], [-3.0], [[-1.0, -2.0]]]
    empty = response_conv.deserialize_forward_backward_output(messages.write_outputs([], {"loss:sum": 0.0}))
    assert empty.loss_fn_outputs == []


def test_samples_reach_the_sdk_with_everything_that_was_asked_for() -> None:
    top = messages.TopK(np.array([[1, 2]]), np.array([[-0.5, -1.5]]))
    targets = messages.Tensor(np.array([-1.0, -2.0], np.float32), (1, 2))
    turns = [Turn("model", [4, 5], [-0.5, -0.25], 0, "stop"), Turn("model", [6], [-1.0], 0, "length")]
    written = messages.write_sample(turns, [top, top], np.array([np.nan, -2.0]), top, targets)
    found = response_conv.deserialize_sample_response(written)
    assert [sequence.tokens for sequence in found.sequences] == [[4, 5], [6]]
    assert [sequence.stop_reason for sequence in found.sequences] == ["stop", "length"]
    assert found.sequences[0].logprobs == [-0.5, -0.25]
    assert found.prompt_logprobs == [None, -2.0]
    assert found.target_prompt_logprobs.tolist() == [[-1.0, -2.0]]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"\xff\xff", "cannot be parsed"),
        (pb.ForwardBackwardRequest(model_id="m" * 9).SerializeToString()[:-1], "cannot be parsed"),
        (b"\x0a\x01\xff", "cannot be parsed"),  # a model_id that is not UTF-8
        (request_with(image=pb.ImageChunk(data=b"png")), "image"),
        (request_with(encoded_text=pb.EncodedTextChunk(tokens=b"abc")), "3 bytes"),
    ],
)
def test_a_malformed_request_is_rejected(body: bytes, words: str) -> None:
    with pytest.raises(PalestraError, match=words):
        messages.read_forward_backward(body)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"shape": [2, 2], "sparse_crow_indices": [0, 2, 3], "sparse_col_indices": [0, 1, 1]}, "2 values and 3 sparse"),
        ({"shape": [3]}, "2 values and the shape"),
        ({"shape": [2, 1, 1]}, r"expected \[N\] or \[N, K\]"),
    ],
)
def test_targets_of_a_prompt_are_checked_as_those_of_training_data(more: dict[str, Any], words: str) -> None:
    with pytest.raises(PalestraError, match=words):
        _ = requests.TargetTokens(data=[7, 8], **more).tensor
