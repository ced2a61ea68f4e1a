"""The engine's numbers beside the model's own forward, for every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_families import COMMON, FAMILIES, tiny_model
from family_cases import quick_case
from transformers import AutoConfig, AutoModelForCausalLM

from palestra.core.errors import UnsupportedModel
from palestra.core.types import SamplingParams, Turn
from palestra.engine.engine import Engine
from palestra.engine.session import Session

GREEDY = SamplingParams(max_new_tokens=5, temperature=0.0)
PROMPT = [5, 17, 99, 23, 64, 3, 42, 81, 7, 12, 90, 31, 56, 44, 8, 77, 15, 60, 29]


@torch.no_grad()
def own_logits(model: Any, ids: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def assert_turn_is_the_models_own(model: Any, session: Session, turn: Turn) -> None:
    start = len(session.token_ids) - len(turn.token_ids)
    logits = own_logits(model, session.token_ids)[start - 1 : -1]
    assert turn.token_ids.tolist() == logits.argmax(-1).tolist()
    expected = logits.log_softmax(-1).max(-1).values
    assert (expected - torch.tensor(turn.logprobs)).abs().max() <= 1e-5


def rounds(engine: Engine, model: Any) -> None:
    """Prefill, fork, three rounds of decode, two ragged appends; each turn equals the model's own forward."""
    group = [*engine.fork(engine.open(PROMPT), 3), engine.open(PROMPT[:4])]
    tools = [[[9, 8, 7], [11], [30, 31, 32, 33, 34, 35, 36], [50, 51]], [[70], [71, 72, 73, 74], [75], [76] * 9]]
    for appended in [None, *tools]:
        if appended:
            for session, ids in zip(group, appended, strict=True):
                engine.append(session, ids)
        for session, turn in zip(group, engine.sample(group, GREEDY), strict=True):
            assert_turn_is_the_models_own(model, session, turn)
    for session in group:
        engine.close(session)
    assert engine.pool.free == engine.pool.pages


@pytest.mark.parametrize("family", [*map(quick_case, FAMILIES)])
def test_greedy_turns_equal_the_models_own_forward(family: str) -> None:
    model = tiny_model(family)
    rounds(Engine(model, page_size=4, kv_memory_gib=0.01), model)


def test_a_vision_model_samples_text_like_its_own_forward() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**sizes, "num_key_value_heads": 2, "head_dim": 16}
    text = {**COMMON, **FAMILIES["gemma4_text"]}
    config = AutoConfig.for_model("gemma4", text_config=text, vision_config=vision, audio_config=None)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    assert hasattr(model.model, "vision_tower")
    rounds(Engine(model, page_size=4, kv_memory_gib=0.01), model)


def test_lora_wrapped_model_equals_the_models_own_forward() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        tiny_model("qwen3"),
        peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False),
    )
    model.train()
    attention = model.config._attn_implementation
    engine = Engine(model, page_size=4, kv_memory_gib=0.01)
    assert engine.runner.fast_decoder is not None
    for version in (0, 1):
        group = engine.fork(engine.open(PROMPT), 2)
        turns = engine.sample(group, GREEDY)
        assert (model.training, model.config._attn_implementation) == (True, attention), "sampling puts both back"
        model.eval()
        for session, turn in zip(group, turns, strict=True):
            assert_turn_is_the_models_own(model, session, turn)
        model.train()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.mul_(1.5)  # a training step
        engine.weights_changed(version + 1)


@pytest.mark.parametrize("changes", [{"use_dora": True}, {"lora_bias": True}, {"modules_to_save": ["lm_head"]}])
def test_variants_of_lora_run_through_the_module_itself(changes: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False, **changes)
    model = peft.get_peft_model(tiny_model("qwen3"), lora).eval()
    engine = Engine(model, page_size=4, kv_memory_gib=0.01)
    assert engine.runner.fast_decoder is None
    session = engine.open(PROMPT)
    [turn] = engine.sample([session], GREEDY)
    assert_turn_is_the_models_own(model, session, turn)


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("mamba", {}, "mamba"),
        ("jamba", {"attn_layer_offset": 9, "attn_layer_period": 10}, "jamba has layers of type linear_attention"),
        ("jamba", {"attn_layer_offset": 1, "attn_layer_period": 2}, "jamba has layers of type linear_attention"),
        ("falcon", {}, "falcon does not attend through"),
        ("stablelm", {}, "StableLmAttention hands no keywords"),
    ],
)
def test_models_that_the_engine_cannot_compute_are_refused_by_name(
    family: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(UnsupportedModel, match=f"{says}.*engine=plain"):
        Engine(tiny_model(family, **changes))


def test_llama_4_samples_its_own_tokens_up_to_the_end_of_the_first_chunk() -> None:
    model = tiny_model("llama4_text", attention_chunk_size=30, floor_scale=32)
    engine = Engine(model, page_size=4, kv_memory_gib=0.01, self_check=False)
    assert engine.context == 30
    group = [engine.open([*PROMPT, number]) for number in range(3, 6)]  # together beyond both
    turns = engine.sample(group, SamplingParams(max_new_tokens=20, temperature=0.0))
    for session, turn in zip(group, turns, strict=True):
        assert turn.finish == "length"
        assert len(session.token_ids) == 30
        assert_turn_is_the_models_own(model, session, turn)
