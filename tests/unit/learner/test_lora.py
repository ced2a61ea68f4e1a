"""Adapters: which layers, and what cannot be had here."""

from __future__ import annotations

import copy
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_families import tiny_model
from torch.utils.checkpoint import CheckpointPolicy
from transformers import AutoModelForCausalLM, Qwen3Config

from palestra.core.config import RunConfig
from palestra.core.config_sections import LoraSection
from palestra.core.errors import SettingError, UnsupportedError
from palestra.engine.supported import adapted_product, is_linear
from palestra.learner import lora as lora_module
from palestra.learner.compiled_layers import _what_to_keep
from palestra.learner.lora import add_lora, build_peft_config, quantization_config
from palestra.train import setup


def build() -> torch.nn.Module:
    config = Qwen3Config(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=16,
        vocab_size=32,
    )
    return AutoModelForCausalLM.from_config(config)


def test_all_linear_layers_but_the_head_get_an_adapter_by_default() -> None:
    model = add_lora(build(), LoraSection(r=4))
    adapted = {name.split(".lora_A")[0].split(".")[-1] for name, _ in model.named_parameters() if "lora_A" in name}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert all("lora_" in name for name, p in model.named_parameters() if p.requires_grad)


def test_the_peft_config_carries_the_section() -> None:
    config = build_peft_config(LoraSection(r=8, alpha=16, dropout=0.1, target_modules=["q_proj"]))
    assert (config.r, config.lora_alpha, config.lora_dropout) == (8, 16, 0.1)
    assert set(config.target_modules) == {"q_proj"}
    with pytest.raises(SettingError, match=r"lora\.r=0"):
        build_peft_config(LoraSection())


@pytest.mark.parametrize(("name", "words"), [("nowhere", "nowhere"), ("experts", "no experts")])
def test_modules_that_do_not_exist_are_named(name: str, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        add_lora(build(), LoraSection(r=4, target_modules=[name]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_four_bits_without_a_gpu_is_a_clear_error() -> None:
    assert quantization_config(LoraSection(r=4)) is None
    with pytest.raises(UnsupportedError, match="CUDA"):
        quantization_config(LoraSection(r=4, load_in_4bit=True))


def test_four_bits_are_nf4_with_double_quantisation_in_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find_spec("peft" if name == "bitsandbytes" else name))
    monkeypatch.setattr(setup, "refuse_what_cannot_fit", lambda *run, **options: None)
    monkeypatch.setattr(
        setup, "load_model", lambda name, **options: SimpleNamespace(tokenizer=None, config=options["quantization"])
    )

    def quantization(**settings: Any) -> Any:
        made: Any = setup.load_for_run(RunConfig.build(settings))
        return made.config

    loaded = quantization(**{"lora.load_in_4bit": True})
    assert (loaded.load_in_4bit, loaded.bnb_4bit_quant_type, loaded.bnb_4bit_use_double_quant) == (True, "nf4", True)
    assert loaded.bnb_4bit_compute_dtype == torch.bfloat16
    half = quantization(**{"lora.load_in_4bit": True, "model.dtype": "float16"})
    assert half.bnb_4bit_compute_dtype == torch.float16
    assert quantization(**{"lora.r": 4}) is None


def test_what_is_not_in_4_bits_keeps_the_dtype_that_sampler_and_learner_are_checked_in() -> None:
    model: Any = build().to(torch.bfloat16)
    model.is_loaded_in_4bit = True  # as transformers marks it; bitsandbytes is not needed for this
    adapted = add_lora(model, LoraSection(load_in_4bit=True))
    own = {p.dtype for name, p in adapted.named_parameters() if "lora_" not in name}
    assert own == {adapted.dtype} == {torch.bfloat16}
    assert {p.dtype for p in adapted.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.parametrize(
    ("operation", "columns", "kept"),
    [("mm", 576, True), ("mm", 16, False), ("addmm", 576, True), ("addmm", 64, False), ("matmul", 576, False)],
)
def test_compiled_layers_keep_the_products_of_weights_but_not_of_adapters(
    operation: str, columns: int, kept: bool
) -> None:
    inputs = [torch.empty(3, columns), torch.empty(columns, 2048)]
    arguments = [torch.empty(2048), *inputs] if operation == "addmm" else inputs
    found = _what_to_keep(None, getattr(torch.ops.aten, operation).default, *arguments)
    assert (found == CheckpointPolicy.MUST_SAVE) is kept


def adapted(in_model_dtype: bool = True, **lora: Any) -> Any:
    """A bfloat16 model whose adapters are not zero."""
    torch.manual_seed(0)
    model = add_lora(build().to(torch.bfloat16), LoraSection(r=4, **lora), in_model_dtype=in_model_dtype)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    return model


def logits_and_gradients(model: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model.zero_grad()
    logits = model(torch.arange(1, 25)[None]).logits.float()
    torch.log_softmax(logits, -1)[..., 3].sum().backward()
    return logits.detach(), [p.grad.clone() for p in model.parameters() if p.requires_grad and p.grad is not None]


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_adapters_of_a_half_precision_model_compute_in_its_dtype_and_give_the_numbers_of_peft() -> None:
    plain, model = adapted(in_model_dtype=False), adapted()
    exact, exact_gradients = logits_and_gradients(copy.deepcopy(plain).float())
    expected, gradients = logits_and_gradients(plain)
    linears = [m for m in model.modules() if type(m).__name__ == "HalfPrecisionLinear"]
    assert len(linears) == 7 * model.config.num_hidden_layers
    assert all(is_linear(linear) for linear in linears), "the sampler still knows them"
    found, own = logits_and_gradients(model)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    assert not torch.equal(found, expected), "they are computed in another way"
    assert error(found, exact) < 1.5 * error(expected, exact) + 0.01
    assert len(own) == len(gradients) == 14
    for mine, theirs, right in zip(own, gradients, exact_gradients, strict=True):
        assert error(mine, right) < error(theirs, right) + 0.05


def test_an_adapter_that_is_switched_off_or_merged_adds_nothing() -> None:
    model = adapted()
    with model.disable_adapter(), torch.no_grad():
        expected = model(torch.arange(1, 25)[None]).logits
    with torch.no_grad():
        with model.disable_adapter():
            assert torch.equal(model(torch.arange(1, 25)[None]).logits, expected)
        own = model(torch.arange(1, 25)[None]).logits.float()
        merged = model.merge_and_unload()(torch.arange(1, 25)[None]).logits.float()
    assert not torch.equal(own, expected.float())
    assert error(merged, own) < 0.05


def test_adapters_drop_out_as_they_are_told() -> None:
    model = adapted(dropout=0.5)
    with torch.no_grad():
        one, other = (model.train()(torch.arange(1, 25)[None]).logits for _ in range(2))
        assert not torch.equal(one, other)
        one, other = (model.eval()(torch.arange(1, 25)[None]).logits for _ in range(2))
        assert torch.equal(one, other)


def test_adapters_of_a_float32_model_and_on_a_cpu_are_those_of_peft() -> None:
    half = build().to(torch.bfloat16)
    for model in (add_lora(build(), LoraSection(r=4), in_model_dtype=True), add_lora(half, LoraSection(r=4))):
        assert not any(type(m).__name__ == "HalfPrecisionLinear" for m in model.modules())


def test_weights_in_4_bits_are_counted_two_in_a_byte() -> None:
    layers = torch.nn.ParameterList([torch.zeros(4, 3)])
    layers.append(torch.nn.Parameter(torch.zeros(6, 1, dtype=torch.uint8), requires_grad=False))
    assert setup.parameter_count(layers) == 12 + 12


def test_a_model_with_half_precision_adapters_can_be_saved_and_loaded_whole(tmp_path: Any) -> None:
    model = adapted()
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    with torch.no_grad():
        ids = torch.arange(1, 25)[None]
        assert torch.equal(loaded.eval()(ids).logits, model.eval()(ids).logits)


def test_a_small_adapter_is_not_rounded_away() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(64, 32), torch.randn(256, 32)
    low, up = torch.full((64, 8), 0.01), torch.full((256, 8), 0.02)  # 0.0016, where a step of the outputs is 0.03
    args = (x.bfloat16(), weight.bfloat16(), None, low.bfloat16(), up.bfloat16())
    found = adapted_product(*args)
    assert found.dtype == torch.bfloat16
    without = args[0].double() @ args[1].double().T
    assert (found.double() - without).mean() == pytest.approx(0.0016, rel=0.3)
    rounded_before = F.linear(*args[:3]) + args[3] @ args[4].T
    assert abs((rounded_before.double() - without).mean()) < 0.0008


def test_the_gradient_of_an_adapted_layer_is_that_of_its_formula() -> None:
    torch.manual_seed(0)
    shapes = ((2, 5, 6), (7, 6), (7,), (2, 5, 3), (7, 3))
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    copies = [x.detach().clone().requires_grad_() for x in inputs]
    out = lora_module._Adapted.apply(*inputs)
    expected = F.linear(copies[0], copies[1], copies[2]) + copies[3] @ copies[4].T
    grad = torch.randn_like(out)
    out.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(out, expected)
    for mine, theirs in zip(inputs, copies, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_experts_get_adapters_by_name_and_learn() -> None:
    model = tiny_model("qwen3_moe")
    adapted = add_lora(model, LoraSection(r=4, target_modules=["q_proj", "experts"]))
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert any("experts" in name for name in trained)
    assert all("experts" in name or "q_proj" in name for name in trained)
    ids = torch.tensor([[5, 17, 99, 23]])
    adapted(input_ids=ids, labels=ids).loss.backward()
    ups = [p.grad for name, p in adapted.named_parameters() if "experts" in name and "lora_B" in name]
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in ups)


@pytest.mark.parametrize(("family", "left_out"), [("nemotron_h", "out_proj"), ("llama4_text", "router")])
def test_linear_layers_that_cannot_be_adapted_are_left_out_by_default(family: str, left_out: str) -> None:
    adapted = add_lora(tiny_model(family), LoraSection(r=4))
    names = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert any("q_proj" in name for name in names)
    assert not any(left_out in name for name in names)
