"""Our GGUF files in the real llama.cpp: the probabilities and token ids of transformers, for every family."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("xllamacpp")
pytest.importorskip("gguf")
sys.path.insert(0, str(Path(__file__).parents[1] / "extras" / "gguf"))

from llama_cpp import LlamaCpp
from small_models import FAMILIES, WINDOW, prompts_of, trained
from small_tokenizers import unicode_strings

from palestra.extras.gguf.export import write_gguf

WORST_NATS = {"f32": 0.02, "f16": 0.02, "bf16": 0.1}


def served(family: str, folder: Path, type: str) -> LlamaCpp:
    model, tokenizer = trained(family)
    path = write_gguf(model.state_dict(), model.config, tokenizer, folder / f"{family}-{type}.gguf", type=type)
    return LlamaCpp(path, context=256)


@pytest.mark.parametrize(
    ("family", "type"), [*((family, "f16") for family in FAMILIES), ("llama3", "f32"), ("gemma3", "bf16")]
)
def test_llama_cpp_gives_the_log_probabilities_and_token_ids_of_transformers(
    family: str, type: str, tmp_path: Path
) -> None:
    model, tokenizer = trained(family)
    server = served(family, tmp_path, type)
    prompts = prompts_of(tokenizer)
    assert len(prompts) == 20
    assert server.worst_difference(model, prompts) <= WORST_NATS[type]
    texts = [*unicode_strings(200), "<|im_start|>user\n the lamp<|im_end|>\n  and <|im_end|>\n"]
    different = [text for text in texts if server.tokenize(text) != tokenizer(text, add_special_tokens=False).input_ids]
    assert different == []


@pytest.mark.parametrize("family", ["llama2", "qwen3", "gemma2"])
def test_eight_bits_keep_the_likeliest_token_at_97_percent_of_positions(family: str, tmp_path: Path) -> None:
    model, tokenizer = trained(family)
    assert served(family, tmp_path, "q8_0").top_agreement(model, prompts_of(tokenizer)) >= 0.97


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_a_wrong_sliding_window_would_show(family: str, tmp_path: Path) -> None:
    model, tokenizer = trained(family)
    assert model.config.sliding_window == WINDOW
    model.config.sliding_window = 4096
    try:
        server = served(family, tmp_path, "f32")
    finally:
        model.config.sliding_window = WINDOW
    longest = [prompt for prompt in prompts_of(tokenizer) if len(prompt) >= 100]
    assert server.worst_difference(model, longest) > 5 * WORST_NATS["f32"]
