"""Where our functions stand in for those of transformers' modeling files."""

from __future__ import annotations

import pytest
import torch
from engine_families import tiny_model
from transformers.models.qwen3_5 import modeling_qwen3_5

from palestra.engine import recurrences
from palestra.engine.recurrences import chunk_gated_delta_rule
from palestra.engine.recurrent import RecurrentLayers


def test_ours_are_called_inside_of_a_pass() -> None:
    model = tiny_model("qwen3_5_text")
    theirs = modeling_qwen3_5.torch_chunk_gated_delta_rule
    sampler, learner = (
        RecurrentLayers(model).use(lambda layer, hidden: hidden) for model in (model, tiny_model("qwen3_5_text"))
    )
    sampler.__enter__()
    learner.__enter__()  # in another thread, and ends later
    sampler.__exit__(None, None, None)
    assert modeling_qwen3_5.torch_chunk_gated_delta_rule is chunk_gated_delta_rule
    learner.__exit__(None, None, None)
    assert modeling_qwen3_5.torch_chunk_gated_delta_rule is theirs


def names(family: str) -> list[str]:
    return [found.name for _, found in recurrences.stand_ins_for(RecurrentLayers(tiny_model(family)).modules)]


@pytest.mark.parametrize("family", ["nemotron_h", "granitemoehybrid", "bamba", "falcon_h1"])
def test_the_scan_of_mamba_2_is_ours_unless_its_package_is_installed(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert names(family) == ["mamba2_chunk_scan"]
    monkeypatch.setattr(recurrences, "find_spec", {"mamba_ssm": object()}.get)
    assert names(family) == []


@pytest.mark.parametrize(
    ("capability", "triton", "is_used"),
    [(None, "3.6.0", False), (8, "3.6.0", False), (9, "3.3.1", False), (9, "3.6.0", True), (9, "3.7.1", False)],
)
def test_with_flash_linear_attention_ours_are_used_where_that_refuses_to_train(
    capability: int | None, triton: str, is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrences, "find_spec", lambda name: object())
    monkeypatch.setattr(recurrences, "installed_version", {"triton": triton}.get)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    assert names("qwen3_5_text") == (["torch_chunk_gated_delta_rule"] if is_used else [])
    assert names("nemotron_h") == []
