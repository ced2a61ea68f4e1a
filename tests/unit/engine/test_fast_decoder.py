"""The fast decoders: which models they run, and weights fused in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_families import tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from palestra.core.config import RunConfig
from palestra.core.types import SamplingParams
from palestra.engine.engine import Engine
from palestra.learner.local import LocalLearner
from palestra.models.export.hf import save_hf
from palestra.models.loading import load_model

pytest.importorskip("triton")
from palestra.engine.cuda.fast_decoder import fuse

GREEDY = SamplingParams(max_new_tokens=4, temperature=0.0)
PROMPT = [5, 17, 99, 23, 64, 3, 42]


def gap_to_the_module(engine: Engine, model: Any) -> float:
    """Largest difference of a turn's logprobs to the module's own."""
    session = engine.open(PROMPT)
    [turn] = engine.sample([session], GREEDY)
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([session.token_ids])).logits[0].log_softmax(-1)
    engine.close(session)
    expected = logprobs[len(PROMPT) - 1 : -1].max(-1).values
    return float((expected - torch.tensor(turn.logprobs)).abs().max())


def takes_the_fast_path(engine: Engine) -> bool:
    return engine.runner.fast_decoder is not None  # type: ignore[attr-defined]


FAST = ("llama", "mistral", "qwen2", "qwen3", "smollm3")


@pytest.mark.parametrize("family", [*FAST, "gemma2", "gpt2", "olmo2", "qwen3_moe", "granite"])
def test_llama_like_decoders_take_the_fast_path_and_others_run_through_their_module(family: str) -> None:
    assert takes_the_fast_path(Engine(tiny_model(family), kv_memory_gib=0.01)) == (family in FAST)


def test_biases_and_norm_weights_are_not_forgotten() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=64)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.rand_like(parameter) * 0.3)
    engine = Engine(model, kv_memory_gib=0.01)
    assert takes_the_fast_path(engine)
    assert gap_to_the_module(engine, model) <= 1e-5


def test_new_weights_are_seen_at_the_next_token() -> None:
    model = tiny_model("qwen3")
    engine = Engine(model, kv_memory_gib=0.01)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    assert gap_to_the_module(engine, model) <= 1e-5, "an ordinary write in place needs no word to the engine"
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    model(input_ids=torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
    optimizer.step()
    engine.weights_changed(1)
    assert gap_to_the_module(engine, model) <= 1e-5


def test_a_hook_on_a_module_keeps_it_on_the_way() -> None:
    model = tiny_model("llama")
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 0.5)
    engine = Engine(model, kv_memory_gib=0.01)
    assert not takes_the_fast_path(engine)
    assert gap_to_the_module(engine, model) <= 1e-5


def test_a_window_that_the_family_does_not_heed_is_not_heeded() -> None:
    model = tiny_model("llama")
    model.config.sliding_window = 3
    engine = Engine(model, kv_memory_gib=0.01)
    assert takes_the_fast_path(engine)
    assert gap_to_the_module(engine, model) <= 1e-5


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
