"""Adapters on stacked experts by low-rank products, against peft's weights with the adapters added."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_families import tiny_model
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor

from palestra.core.config_sections import LoraSection
from palestra.core.types import SamplingParams
from palestra.engine.engine import Engine
from palestra.learner.lora import add_lora
from palestra.learner.lora_experts import SortedRows

FAMILIES = [
    *("qwen3_moe", "olmoe", "granitemoe", "gpt_oss", "lfm2_moe", "qwen3_5_moe_text", "qwen3_next", "nemotron_h"),
    "granitemoehybrid",
]
IDS = torch.tensor([[5, 17, 99, 23, 4, 61, 7, 30, 8, 77, 12]])


def adapted(family: str, targets: tuple[str, ...] = ("q_proj", "experts"), r: int = 4, std: float = 0.1) -> Any:
    """A model whose adapters change its numbers."""
    model = add_lora(tiny_model(family), LoraSection(r=r, target_modules=list(targets)))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)
    return model.eval()


def by_peft(model: Any) -> Any:
    """A copy that computes as peft does."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, ParamWrapper):
            module.__class__ = ParamWrapper
    return model


@pytest.fixture
def no_weights_with_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("peft adds an adapter to the weights of all experts")

    monkeypatch.setattr(ParamWrapper, "_activate_lora", refuse)


def logits_and_gradients(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logits = model(input_ids=IDS, use_cache=False).logits
    (logits.log_softmax(-1) * torch.linspace(-1, 2, logits.numel()).view_as(logits)).sum().backward()
    return logits, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("family", "rank"), [*((family, 4) for family in FAMILIES), ("qwen3_moe", 1), ("gpt_oss", 3)])
def test_logits_and_gradients_are_those_of_peft(family: str, rank: int, request: pytest.FixtureRequest) -> None:
    model = adapted(family, r=rank)
    expected, theirs = logits_and_gradients(by_peft(model))
    request.getfixturevalue("no_weights_with_adapters")
    found, ours = logits_and_gradients(model)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    assert found.shape == expected.shape
    assert ours.keys() == theirs.keys()
    assert any("experts" in name and "lora_A" in name for name in ours)
    for name, gradient in theirs.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(ours[name] / scale, gradient / scale, rtol=1e-5, atol=1e-5, msg=name)


def test_one_adapted_stack_leaves_the_other_as_it_is() -> None:
    model = adapted("qwen3_moe")
    for module in model.modules():
        if isinstance(module, ParamWrapper) and module.parameter_name == "down_proj":
            torch.nn.init.zeros_(module.lora_B["default"].weight)
    torch.testing.assert_close(logits_and_gradients(model)[0], logits_and_gradients(by_peft(model))[0])


def test_disabled_and_merged_adapters_are_left_to_peft() -> None:
    model = adapted("gpt_oss")
    base, with_adapter = tiny_model("gpt_oss")(IDS).logits, model(IDS).logits
    assert (base - with_adapter).abs().max() > 0.1
    with model.disable_adapter():
        torch.testing.assert_close(model(IDS).logits, base)
    torch.testing.assert_close(copy.deepcopy(model).merge_and_unload()(IDS).logits, with_adapter, rtol=1e-4, atol=1e-4)


def test_adapters_are_saved_as_by_peft(tmp_path: Path) -> None:
    model = adapted("qwen3_moe")
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model("qwen3_moe"), tmp_path).eval()
    assert all(type(m) is ParamWrapper for m in loaded.modules() if isinstance(m, ParamWrapper))
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-4)


def test_a_model_can_be_written_whole() -> None:
    model, file = adapted("qwen3_moe"), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file, weights_only=False)(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("rank", [4, 8])  # 4 is padded
def test_a_small_adapter_is_not_rounded_away_in_half_precision(rank: int) -> None:
    model = adapted("qwen3_moe", ("experts",), r=rank, std=3e-5)
    hidden = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    chosen, weights = torch.arange(128).view(64, 2) % 4, torch.full((64, 2), 0.5)

    def change(model: Any, dtype: torch.dtype) -> Tensor:
        """What the adapters add to the output of the first layer's experts."""
        experts = model.get_base_model().model.layers[0].mlp.experts.to(dtype)
        with torch.no_grad():
            with_adapters = experts(hidden.to(dtype), chosen, weights.to(dtype)).float()
            for wrapper in (m for m in experts.modules() if isinstance(m, ParamWrapper)):
                wrapper.lora_B["default"].weight.zero_()
            return (with_adapters - experts(hidden.to(dtype), chosen, weights.to(dtype)).float()).flatten()

    exact = change(copy.deepcopy(model), torch.float32)
    ours, theirs = (change(m, torch.bfloat16) @ exact / (exact @ exact) for m in (copy.deepcopy(model), by_peft(model)))
    assert float(ours) == pytest.approx(1.0, abs=0.15)
    assert float(theirs) < 0.7


def test_half_precision_trains_every_adapter() -> None:
    model = adapted("gpt_oss", ("experts",)).to(torch.bfloat16)
    exact = logits_and_gradients(copy.deepcopy(model).float())[1]
    _, found = logits_and_gradients(model)
    for name, gradient in exact.items():
        assert torch.cosine_similarity(found[name].float().flatten(), gradient.flatten(), 0) > 0.95, name


@pytest.mark.usefixtures("no_weights_with_adapters")
def test_the_engine_samples_with_low_rank_products() -> None:
    model = adapted("qwen3_moe")
    engine = Engine(model, page_size=4, kv_memory_gib=0.01, self_check=False)
    session = engine.open(IDS[0].tolist())
    [turn] = engine.sample([session], [SamplingParams(6, seed=0)])
    ids = torch.tensor([session.token_ids])
    logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(-1, ids[0, 1:, None])[-len(turn.logprobs) :, 0]
    torch.testing.assert_close(torch.tensor(turn.logprobs), expected, rtol=1e-4, atol=1e-4)


def test_rows_are_sorted_by_expert() -> None:
    rows = SortedRows.of(torch.tensor([[2, 0], [0, 3]]), experts=5)
    assert rows.expert.tolist() == [0, 0, 2, 3]
    assert rows.ends.tolist() == [2, 2, 3, 4, 4]
