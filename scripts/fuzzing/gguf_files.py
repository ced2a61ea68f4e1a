"""Mutated GGUF files: each is refused in one sentence, or loads."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import torch

from fuzzing.check import Tally, mutate
from palestra.extras.gguf.export import write_gguf
from palestra.extras.gguf.read import convert

SIZES = dict(
    hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1, head_dim=8, vocab_size=280,
    max_position_embeddings=64, query_pre_attn_scalar=8, bos_token_id=None, eos_token_id=256, pad_token_id=None,
)  # fmt: skip
FAMILIES = {"llama": True, "qwen3": True, "gemma2": True, "gemma3_text": False, "mistral": False}


def fuzz(count: int, rng: random.Random, folder: Path) -> Tally:
    tally = Tally("gguf files")
    files = [path.read_bytes() for path in small_files(folder)]
    path, out = folder / "mutated.gguf", folder / "out"
    for number in range(count):
        data = rng.choice(files)
        weights = data.rfind(b"output_norm.weight") + 64  # the header ends about there; the rest is weights
        changed = mutate(data[:weights], rng) + data[weights:] if rng.random() < 0.9 else mutate(data, rng)
        path.write_bytes(changed)
        with tally.watch(f"file {number}"):
            convert(path, out)
        shutil.rmtree(out, ignore_errors=True)
    return tally


def small_files(folder: Path) -> list[Path]:
    """A file of some families, with either kind of tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    paths = []
    for family, byte_level in FAMILIES.items():
        tied = family.startswith("gemma")
        config = AutoConfig.for_model(family, num_hidden_layers=1, tie_word_embeddings=tied, **SIZES)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        weights = {name: weight for name, weight in model.state_dict().items() if not (tied and "lm_head" in name)}
        paths.append(write_gguf(weights, config, small_tokenizer(byte_level), folder / f"{family}.gguf", type="f16"))
    return paths


def small_tokenizer(byte_level: bool) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if byte_level:
        tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>", "ab", "Ġab"]
        backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [("a", "b"), ("Ġ", "ab")]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
    else:
        tokens = [*(f"<0x{byte:02X}>" for byte in range(256)), "<end>", "<unk>", "▁", "a", "b", "ab"]
        index = {token: i for i, token in enumerate(tokens)}
        backend = Tokenizer(models.BPE(index, [("a", "b")], unk_token="<unk>", byte_fallback=True))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<end>", chat_template="{{ messages[0].content }}<end>"
    )
