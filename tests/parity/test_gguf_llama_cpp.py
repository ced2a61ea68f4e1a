"""Our GGUF files, run by the real llama.cpp: the probabilities of transformers, for every family."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("xllamacpp")
pytest.importorskip("gguf")
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "models" / "gguf"))

from llama_cpp import LlamaCpp
from small_models import FAMILIES, WINDOW, prompts_of, trained
from small_tokenizers import unicode_strings

from palestra.models.gguf.write import write_gguf

WORST_NATS = 0.02


def export(family: str, folder: Path, type: str) -> Path:
    model, tokenizer = trained(family)
    return write_gguf(model.state_dict(), model.config, tokenizer, folder / f"{family}-{type}.gguf", type=type)


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_gives_the_log_probabilities_of_transformers(family: str, tmp_path: Path) -> None:
    model, tokenizer = trained(family)
    prompts = prompts_of(tokenizer)
    assert len(prompts) == 20
    for type in ("f32", "f16", "bf16"):
        server = LlamaCpp(export(family, tmp_path, type), context=256)
        worst = server.worst_difference(model, prompts if type != "bf16" else prompts[:2])
        assert worst <= (WORST_NATS if type != "bf16" else 0.1), type


@pytest.mark.parametrize("family", FAMILIES)
def test_eight_bits_keep_the_likeliest_token_at_97_percent_of_positions(family: str, tmp_path: Path) -> None:
    model, tokenizer = trained(family)
    server = LlamaCpp(export(family, tmp_path, "q8_0"), context=256)
    assert server.top_agreement(model, prompts_of(tokenizer)) >= 0.97


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_splits_text_into_the_same_tokens(family: str, tmp_path: Path) -> None:
    _, tokenizer = trained(family)
    server = LlamaCpp(export(family, tmp_path, "f16"), context=256)
    texts = [*unicode_strings(200), "<|im_start|>user\n the lamp<|im_end|>\n  and <|im_end|>\n"]
    different = [text for text in texts if server.tokenize(text) != tokenizer(text, add_special_tokens=False).input_ids]
    assert different == []


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_a_wrong_sliding_window_would_show(family: str, tmp_path: Path) -> None:
    model, tokenizer = trained(family)
    path = tmp_path / "wide.gguf"
    assert model.config.sliding_window == WINDOW
    model.config.sliding_window = 4096
    try:
        write_gguf(model.state_dict(), model.config, tokenizer, path, type="f32")
    finally:
        model.config.sliding_window = WINDOW
    longest = [prompt for prompt in prompts_of(tokenizer) if len(prompt) >= 100]
    assert LlamaCpp(path, context=256).worst_difference(model, longest) > 5 * WORST_NATS
