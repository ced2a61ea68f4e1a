"""Linear layers that the GPU engine runs as one stay what they are for everybody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from palestra.core.config import RunConfig
from palestra.engine.cuda.decoder_layers import fuse
from palestra.learner.local import LocalLearner
from palestra.models.export.hf import save_hf
from palestra.models.loading import load_model


def fuse_all(model: Any) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Every layer's q, k and v as one, and its gate and up."""
    fused = []
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        fused.append(fuse([attention.q_proj, attention.k_proj, attention.v_proj]))
        fused.append(fuse([mlp.gate_proj, mlp.up_proj]))
    return fused


def addresses(model: Any) -> list[int]:
    return [parameter.data_ptr() for parameter in model.parameters()]


def test_a_model_with_fused_weights_is_saved_whole(tmp_path: Path) -> None:
    loaded = load_model("palestra/tiny")
    expected = {name: weight.clone() for name, weight in loaded.model.state_dict().items()}
    fuse_all(loaded.model)
    learner = LocalLearner(loaded.model, config=RunConfig.build({}))
    (tmp_path / "checkpoint").mkdir()
    learner.save(tmp_path / "checkpoint")
    save_hf(loaded.model, loaded.tokenizer, tmp_path / "model")

    again = load_model(str(tmp_path / "model")).model
    for name, weight in again.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.zero_()
    learner.load(tmp_path / "checkpoint")
    for name, weight in loaded.model.state_dict().items():
        assert torch.equal(weight, expected[name]), name


def test_fused_weights_follow_an_update_in_place() -> None:
    model = load_model("palestra/tiny").model.eval()
    attention = model.model.layers[1].self_attn
    linears = [attention.q_proj, attention.k_proj, attention.v_proj]
    weight, bias = fuse(linears)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    x = torch.randn(3, weight.shape[1])
    expected = torch.cat([linear(x) for linear in linears], -1)
    assert torch.allclose(torch.nn.functional.linear(x, weight, bias), expected, atol=1e-6)


def test_a_second_engine_on_one_module_shares_its_buffers() -> None:
    model = load_model("palestra/tiny").model
    first = fuse_all(model)
    before = addresses(model)
    second = fuse_all(model)
    assert addresses(model) == before, "what the first engine's graphs read must stay where it is"
    assert [weight.data_ptr() for weight, _ in second] == [weight.data_ptr() for weight, _ in first]
    assert [weight.shape for weight, _ in second] == [weight.shape for weight, _ in first]


def test_a_weight_that_was_moved_is_fused_again() -> None:
    linears = [torch.nn.Linear(4, size) for size in (6, 2, 2)]
    fuse(linears)
    linears[1].weight.data = linears[1].weight.data + 1.0
    weight, bias = fuse(linears)
    assert torch.equal(weight, torch.cat([linear.weight for linear in linears]))
    assert bias is not None
    assert torch.equal(bias, torch.cat([linear.bias for linear in linears]))


def test_fused_weights_can_be_trained_also_when_they_were_fused_while_sampling() -> None:
    linears = [torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)]
    with torch.inference_mode():
        fuse(linears)
    linears[0](torch.randn(2, 4)).sum().backward()
    assert linears[0].weight.grad is not None
