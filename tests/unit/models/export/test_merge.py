"""Adapters leave merged, into the base that they were trained on."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("gguf")
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[3] / "extras" / "gguf"))

from transformers import AutoModelForCausalLM, AutoTokenizer

from palestra.core.config_sections import LoraSection
from palestra.core.errors import UnreadableFileError, UnsupportedError
from palestra.extras.gguf.export import to_gguf
from palestra.extras.gguf.source import open_source
from palestra.learner.lora import add_lora
from palestra.models.export.hf import save_hf, to_hf
from palestra.models.loading import load_model

PROMPT = "<|im_start|>user\nWhat does a red lamp cost?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def adapted(tiny: Any, tmp_path: Path) -> tuple[Any, Path]:
    """palestra/tiny with an adapter that does something, and the folder that a run would leave of it."""
    torch.manual_seed(0)
    model = add_lora(tiny.model, LoraSection(r=4)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    folder = save_hf(model, tiny.tokenizer, tmp_path / "run" / "model", record={"instructions": "Be brief."})
    return model, folder


def last_logits(model: Any, tokenizer: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokenizer(PROMPT).input_ids])).logits[0, -1]


def test_an_adapter_run_saves_the_adapter_and_on_request_the_merged_model(adapted, tiny, tmp_path):
    model, folder = adapted
    assert (folder / "adapter_model.safetensors").exists()
    assert not (folder / "model.safetensors").exists()
    card = (folder / "README.md").read_text()
    assert "More Information Needed" not in card
    for said in ("A LoRA adapter (rank 4, alpha 32) on down_proj, gate_proj", "palestra/tiny", "> Be brief."):
        assert said in card
    whole = save_hf(model, tiny.tokenizer, tmp_path / "whole", merge=True)
    assert (whole / "generation_config.json").exists()
    assert (whole / "chat_template.jinja").exists()
    expected = last_logits(model, tiny.tokenizer)
    for saved in (folder, whole, whole / "adapter"):
        loaded = load_model(str(saved))
        assert not hasattr(loaded.model, "peft_config")
        assert torch.allclose(last_logits(loaded.model, tiny.tokenizer), expected, atol=1e-4), saved
    plain = load_model("palestra/tiny").model
    assert not torch.allclose(last_logits(plain, tiny.tokenizer), expected, atol=0.1)


def test_an_exported_adapter_gives_the_same_probabilities_in_llama_cpp(adapted, tmp_path):
    pytest.importorskip("xllamacpp")
    from llama_cpp import LlamaCpp

    model, folder = adapted
    source = open_source(str(folder))
    assert source.instructions == "Be brief."
    server = LlamaCpp(to_gguf(source, tmp_path / "merged.gguf", type="f32"))
    prompt = source.tokenizer(PROMPT).input_ids
    assert server.worst_difference(model, [prompt]) <= 0.02
    assert server.worst_difference(load_model("palestra/tiny").model, [prompt]) > 0.1


def test_a_hugging_face_folder_of_an_adapter_is_a_whole_model(adapted: tuple[Any, Path], tmp_path: Path) -> None:
    model, folder = adapted
    whole = to_hf(str(folder), tmp_path / "hf")
    assert json.loads((whole / "palestra.json").read_text()) == {"instructions": "Be brief."}
    tokenizer = AutoTokenizer.from_pretrained(whole)
    expected = last_logits(model, tokenizer)
    assert torch.allclose(last_logits(AutoModelForCausalLM.from_pretrained(whole), tokenizer), expected, atol=1e-4)


def test_an_adapter_for_other_weights_of_the_same_shape_is_refused_by_name(adapted, tmp_path):
    _, folder = adapted
    sibling = load_model("palestra/tiny")
    with torch.no_grad():
        sibling.model.get_input_embeddings().weight.mul_(1.1)
    point_to(folder, save_hf(sibling.model, sibling.tokenizer, tmp_path / "sibling"))
    with pytest.raises(
        UnreadableFileError, match=r"was trained on another base than .*sibling.*its weights are different"
    ):
        to_hf(str(folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_base_held_in_four_bits_is_not_merged_into(adapted: tuple[Any, Path], tiny: Any, tmp_path: Path) -> None:
    model, _ = adapted
    model.is_loaded_in_4bit = True
    with pytest.raises(UnsupportedError, match="held in 4 bits"):
        save_hf(model, tiny.tokenizer, tmp_path / "out", merge=True)
    assert not list(tmp_path.glob("*out*"))


def point_to(folder: Path, base: Path) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": str(base)}))
