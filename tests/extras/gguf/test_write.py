"""The contents of a written GGUF file; a failed export leaves no file."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("gguf")
sys.path.insert(0, str(Path(__file__).parent))

from gguf import GGUFReader
from small_models import sharp
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, GPT2Config, LlamaConfig, Qwen3Config

from palestra.core.errors import (
    MissingPackageError,
    PalestraError,
    ServiceError,
    SettingError,
    UnreadableFileError,
    UnsupportedError,
)
from palestra.extras.gguf.config import ARCHITECTURES, config_to_gguf
from palestra.extras.gguf.export import find_llama_quantize, modelfile, to_gguf, write_gguf
from palestra.extras.gguf.source import open_source


def write(model: Any, tokenizer: Any, path: Path, **options: Any) -> Path:
    return write_gguf(model.state_dict(), model.config, tokenizer, path, **options)


def fields(path: Path) -> dict[str, Any]:
    return {key: field.contents() for key, field in GGUFReader(path).fields.items()}


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_tied_embeddings_are_written_once_and_vectors_stay_exact(tiny: Any, tmp_path: Path) -> None:
    path = write(tiny.model, tiny.tokenizer, tmp_path / "tiny.gguf", type="q8_0")
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    assert "output.weight" not in tensors
    assert tensors["token_embd.weight"].tensor_type.name == "Q8_0"
    norm = tensors["output_norm.weight"]
    assert norm.tensor_type.name == "F32"
    assert torch.equal(torch.tensor(norm.data), tiny.model.model.norm.weight.detach())


def test_rows_that_blocks_do_not_divide_stay_16_bit(tiny: Any, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=1024, hidden_size=64, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    model = AutoModelForCausalLM.from_config(config)
    path = write(model, tiny.tokenizer, tmp_path / "odd.gguf", type="q8_0")
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(path).tensors}
    assert (types["blk.0.ffn_up.weight"], types["blk.0.ffn_down.weight"]) == ("Q8_0", "F16")


def test_a_window_that_llama_cpp_lacks_ends_the_context() -> None:
    model, _ = sharp("mistral")
    assert (model.config.max_position_embeddings, model.config.sliding_window) == (256, 128)
    assert config_to_gguf(model.config)["context_length"] == 128
    gemma, _ = sharp("gemma2")
    assert config_to_gguf(gemma.config)["context_length"] == 256


def test_another_period_of_full_layers_is_written() -> None:
    every_second = Gemma3TextConfig(
        num_hidden_layers=4,
        head_dim=32,
        query_pre_attn_scalar=32,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    fields = config_to_gguf(every_second)
    assert fields["attention.sliding_window_pattern"] == 2
    assert fields["rope.freq_base_swa"] == 10_000.0
    assert fields["rope.freq_base"] == 1_000_000.0
    irregular = Gemma3TextConfig(
        num_hidden_layers=3, head_dim=256, layer_types=["full_attention", "sliding_attention", "sliding_attention"]
    )
    with pytest.raises(UnsupportedError, match="full attention at regular intervals"):
        config_to_gguf(irregular)


def test_an_unknown_architecture_is_rejected_with_the_known_ones(tiny: Any, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=1024))
    with pytest.raises(UnsupportedError, match="'gpt2' cannot be written as GGUF") as rejected:
        write(model, tiny.tokenizer, tmp_path / "gpt2.gguf")
    assert all(row.model_type in str(rejected.value) for row in ARCHITECTURES)
    assert left_in(tmp_path) == []


CONVERTER = """
import json, sys
from pathlib import Path

folder, _, path, _, type_ = sys.argv[1:]
config = json.loads((Path(folder) / "config.json").read_text())
weights = (Path(folder) / "model.safetensors").stat().st_size
Path(path).write_text(json.dumps([config["model_type"], type_, weights > 1000]))
"""


@pytest.mark.parametrize("in_memory", [True, False])
def test_other_architectures_are_written_by_llama_cpps_converter(tiny, tmp_path, monkeypatch, in_memory):
    """A stand-in for convert_hf_to_gguf.py, with its arguments."""
    (tmp_path / "llama.cpp").mkdir()
    (tmp_path / "llama.cpp" / "convert_hf_to_gguf.py").write_text(CONVERTER)
    monkeypatch.setenv("LLAMA_CPP_PATH", str(tmp_path / "llama.cpp"))
    model = AutoModelForCausalLM.from_config(GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=1024))
    model.save_pretrained(tmp_path / "gpt2")
    tiny.tokenizer.save_pretrained(tmp_path / "gpt2")
    source = open_source(str(tmp_path / "gpt2"))
    if in_memory:
        source = replace(source, weights=dict(source.weights))
    made = to_gguf(source, tmp_path / "gpt2.gguf", type="f16")
    assert json.loads(made.read_text()) == ["gpt2", "f16", True]
    assert "num_ctx 1024" in modelfile(source, "gpt2.gguf")
    (tmp_path / "llama.cpp" / "convert_hf_to_gguf.py").write_text("raise SystemExit('Model is not supported')")
    with pytest.raises(ServiceError, match="Model is not supported"):
        to_gguf(source, tmp_path / "other.gguf", type="f16")
    assert not (tmp_path / "other.gguf").exists()


def test_a_scale_or_rope_that_gguf_cannot_hold_is_rejected() -> None:
    with pytest.raises(UnsupportedError, match="query_pre_attn_scalar=144"):
        config_to_gguf(Gemma2Config(query_pre_attn_scalar=144))
    config = Qwen3Config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(UnsupportedError, match="rope type 'dynamic'"):
        config_to_gguf(config)


def no_template(tiny: Any, patch: pytest.MonkeyPatch) -> None:
    tiny.tokenizer.chat_template = None


def large_number(tiny: Any, patch: pytest.MonkeyPatch) -> None:
    tiny.model.model.layers[1].mlp.up_proj.weight.data[0, 0] = 1e6


def full_disk(tiny: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**20))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (no_template, "has no chat template"),
        (large_number, r"blk\.1\.ffn_up\.weight has numbers that f16 cannot hold"),
        (full_disk, r"has 1 MiB free, and the export needs about \d+ MiB"),
    ],
)
def test_a_failed_export_leaves_nothing(tiny, tmp_path, monkeypatch, change, words):
    change(tiny, monkeypatch)
    with pytest.raises(PalestraError, match=words):
        write(tiny.model, tiny.tokenizer, tmp_path / "tiny.gguf", type="f16")
    assert left_in(tmp_path) == []


def test_a_model_folder_is_read_tensor_by_tensor(tiny: Any, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny.model.save_pretrained(folder, max_shard_size="500KB")
    tiny.tokenizer.save_pretrained(folder)
    assert (folder / "model.safetensors.index.json").exists()
    source = open_source(str(folder))
    assert not isinstance(source.weights, dict)
    from_folder = to_gguf(source, tmp_path / "a.gguf", type="f16")
    from_memory = write(tiny.model, tiny.tokenizer, tmp_path / "b.gguf", type="f16", name=source.name)
    assert from_folder.read_bytes() == from_memory.read_bytes()


def test_broken_weights_are_rejected_by_name(tiny: Any, tmp_path: Path) -> None:
    tiny.model.save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(UnreadableFileError, match=r"model\.safetensors cannot be read"):
        open_source(str(tmp_path))


def test_unknown_types_and_a_missing_llama_cpp_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source("palestra/tiny")
    with pytest.raises(SettingError, match="no GGUF type 'q4_m'"):
        to_gguf(source, tmp_path / "a.gguf", type="q4_m")
    for name in ("PATH", "HOME", "LLAMA_CPP_PATH"):
        monkeypatch.setenv(name, "")
    with pytest.raises(MissingPackageError, match="LLAMA_CPP_PATH"):
        to_gguf(source, tmp_path / "a.gguf", type="q4_k_m")
    with pytest.raises(SettingError, match=r"llama_cpp_path=.* has no llama-quantize"):
        to_gguf(source, tmp_path / "a.gguf", type="q4_k_m", llama_cpp=str(tmp_path))
    assert left_in(tmp_path) == []


def test_llama_cpp_in_a_usual_folder_is_used_and_a_checkout_without_a_build_is_named(tmp_path, monkeypatch):
    for name, value in (("PATH", ""), ("HOME", str(tmp_path)), ("LLAMA_CPP_PATH", "")):
        monkeypatch.setenv(name, value)
    checkout = tmp_path / "code" / "llama.cpp"
    checkout.mkdir(parents=True)
    (checkout / "CMakeLists.txt").touch()
    with pytest.raises(
        MissingPackageError, match=rf"{checkout} has not built yet; build it there with: cmake -B build"
    ):
        find_llama_quantize()
    assert stand_in(checkout, "") == find_llama_quantize()


def stand_in(folder: Path, body: str) -> Path:
    program = folder / "build" / "bin" / "llama-quantize"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!{sys.executable}\nimport json, shutil, sys\n{body}\n")
    program.chmod(0o755)
    return program


def test_other_types_go_through_llama_quantize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tmp_path / "calls.json"
    stand_in(
        tmp_path / "llama.cpp",
        f"json.dump(sys.argv[1:], open({str(calls)!r}, 'w'))\nshutil.copy(sys.argv[1], sys.argv[2])",
    )
    monkeypatch.setenv("LLAMA_CPP_PATH", str(tmp_path / "llama.cpp"))
    out = tmp_path / "out"
    path = to_gguf(open_source("palestra/tiny"), out / "tiny.gguf", type="Q4_K_M")
    whole, aside, type_name = json.loads(calls.read_text())
    assert type_name == "Q4_K_M"
    assert Path(whole).parent == Path(aside).parent == out
    assert fields(path)["general.file_type"] == 1  # the stand-in passed the f16 file on
    assert left_in(out) == ["tiny.gguf"]


def test_a_failing_llama_quantize_is_quoted_and_leaves_nothing(tmp_path: Path) -> None:
    stand_in(tmp_path / "llama.cpp", "print('first', file=sys.stderr)\nsys.exit('bad tensor')")
    out = tmp_path / "out"
    with pytest.raises(ServiceError, match=r"could not make q4_k_m \(exit 1\): bad tensor"):
        to_gguf(open_source("palestra/tiny"), out / "a.gguf", type="q4_k_m", llama_cpp=str(tmp_path / "llama.cpp"))
    assert left_in(out) == []
