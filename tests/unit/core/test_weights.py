"""Weights: in memory, or in a file that any process can read."""

import pytest
import torch

from palestra.core.weights import Weights


def tensors() -> dict[str, torch.Tensor]:
    layer = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    return {"a.weight": layer.T, "b.weight": torch.ones(2, dtype=torch.bfloat16, requires_grad=True)}


def test_saved_weights_are_read_back_with_their_version(tmp_path):
    path = Weights(7, tensors).save(tmp_path / "weights.safetensors")
    again = Weights.load(path)
    assert again.version == 7
    assert again.module is None
    assert again.tensors().keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert torch.equal(again.tensors()[name], tensor)
        assert again.tensors()[name].dtype == tensor.dtype


def test_tensors_are_those_of_the_moment_in_which_they_are_asked_for():
    values = [torch.zeros(1)]
    weights = Weights(1, lambda: {"x": values[0]})
    values[0] = torch.ones(1)
    assert weights.tensors()["x"] == 1


def test_a_write_that_fails_leaves_the_older_file_whole(tmp_path, monkeypatch):
    path = Weights(1, tensors).save(tmp_path / "weights.safetensors")

    def fail(tensors, to, metadata) -> None:
        to.write_bytes(b"half of it")
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", fail)
        with pytest.raises(OSError, match="full"):
            Weights(2, tensors).save(path)
    assert Weights.load(path).version == 1
    assert Weights(3, tensors).save(path) == path
    assert Weights.load(path).version == 3
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
