"""Adapters: which layers, and what cannot be had here."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy
from transformers import AutoModelForCausalLM, Qwen3Config

from palestra.core.config import RunConfig
from palestra.core.config_sections import LoraSection
from palestra.core.errors import PalestraError
from palestra.learner.forward import _what_to_keep
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
    with pytest.raises(PalestraError, match=r"lora\.r=0"):
        build_peft_config(LoraSection())


def test_modules_that_do_not_exist_are_named() -> None:
    with pytest.raises(PalestraError, match="nowhere"):
        add_lora(build(), LoraSection(r=4, target_modules=["nowhere"]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_four_bits_without_a_gpu_is_a_clear_error() -> None:
    assert quantization_config(LoraSection(r=4)) is None
    with pytest.raises(PalestraError, match="CUDA"):
        quantization_config(LoraSection(r=4, load_in_4bit=True))


def test_four_bits_are_nf4_with_double_quantisation_in_every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find_spec("peft" if name == "bitsandbytes" else name))
    monkeypatch.setattr(setup, "load_model", lambda name, **options: options["quantization"])
    monkeypatch.setattr(setup, "refuse_what_cannot_fit", lambda *run: None)
    loaded = setup.load_for_run(RunConfig.build({"lora.load_in_4bit": True}))
    assert (loaded.load_in_4bit, loaded.bnb_4bit_quant_type, loaded.bnb_4bit_use_double_quant) == (True, "nf4", True)
    assert loaded.bnb_4bit_compute_dtype == torch.bfloat16
    half = setup.load_for_run(RunConfig.build({"lora.load_in_4bit": True, "model.dtype": "float16"}))
    assert half.bnb_4bit_compute_dtype == torch.float16
    assert setup.load_for_run(RunConfig.build({"lora.r": 4})) is None


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


def test_weights_in_4_bits_are_counted_two_in_a_byte() -> None:
    layers = torch.nn.ParameterList([torch.zeros(4, 3)])
    layers.append(torch.nn.Parameter(torch.zeros(6, 1, dtype=torch.uint8), requires_grad=False))
    assert setup.parameter_count(layers) == 12 + 12
