from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from palestra.core.errors import PalestraError
from palestra.models.loading import LoadedModel, canonical_name, load_model


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("palestra/tiny", "palestra/tiny"),
        ("palestra/smollm2", "palestra/smollm2"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("hf.co/Qwen/Qwen3-0.6B-GGUF:Q8_0", "Qwen/Qwen3-0.6B"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("litellm/ollama_chat/hf.co/Qwen/Qwen3-0.6B-GGUF:Q8_0", "Qwen/Qwen3-0.6B"),
        ("litellm/ollama/hf.co/bartowski/Some-Model-gguf", "bartowski/Some-Model"),
        ("models/qwen3-0.6b-Q8_0.gguf", "models/qwen3-0.6b-Q8_0.gguf"),
        ("gpt2", "gpt2"),
    ],
)
def test_names_lose_their_route_tag_and_gguf_ending(name: str, expected: str) -> None:
    assert canonical_name(name) == expected


def test_an_existing_folder_keeps_its_name_whatever_it_looks_like(tmp_path: Path) -> None:
    folder = tmp_path / "my:model-GGUF"
    folder.mkdir()
    assert canonical_name(str(folder)) == str(folder)


def test_tiny_loads_offline_in_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    load_model("palestra/tiny", device="cpu")  # the first one pays for imports

    def no_network(*args: object, **kwargs: object) -> None:
        raise AssertionError("loading palestra/tiny asked for the network")

    monkeypatch.setattr("socket.socket.connect", no_network)
    began = time.process_time()
    loaded = load_model("palestra/tiny", device="cpu")
    assert time.process_time() - began < 2.0  # CPU time of all threads
    assert isinstance(loaded, LoadedModel)
    assert (loaded.name, loaded.model.dtype) == ("palestra/tiny", torch.float32)
    assert Path(loaded.path).is_dir()


def test_a_saved_folder_loads_with_the_dtype_asked_for(tmp_path: Path) -> None:
    loaded = load_model("palestra/tiny", device="cpu")
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    again = load_model(str(tmp_path), dtype="bfloat16", device="cpu")
    assert again.model.dtype == torch.bfloat16
    assert again.tokenizer.chat_template == loaded.tokenizer.chat_template


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("palestra/huge", "palestra/tiny"),
        ("./no/such/folder", "no folder"),
        ("/no/such/folder", "no folder"),
        ("a name with spaces", "no folder"),
    ],
)
def test_a_name_that_means_nothing_says_what_to_give(name: str, words: str) -> None:
    with pytest.raises(PalestraError, match=words):
        load_model(name)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(PalestraError, match=r"no config\.json"):
        load_model(str(tmp_path))


def test_a_hub_that_cannot_be_reached_leads_to_a_local_folder_or_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoTokenizer

    def unreachable(*args: object, **kwargs: object) -> None:
        raise OSError("We couldn't connect to 'https://huggingface.co' to load the files.\nMore lines.")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", unreachable)
    with pytest.raises(PalestraError, match=r"could not be loaded.*connect.*local folder.*palestra/tiny"):
        load_model("nobody/nothing")


@pytest.mark.parametrize(("option", "value"), [("dtype", "float12"), ("device", "abacus")])
def test_unknown_dtype_and_device_name_the_known_ones(option: str, value: str) -> None:
    with pytest.raises(PalestraError, match="auto"):
        load_model("palestra/tiny", **{"device": "cpu", option: value})
