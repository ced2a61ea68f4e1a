"""Models of every family, written as GGUF by our exporter and read back: the same numbers, the same tokens."""

from __future__ import annotations

import sys
import unicodedata
from pathlib import Path

import pytest
import torch

pytest.importorskip("gguf", reason="pip install 'palestra[gguf]'")
sys.path.insert(0, str(Path(__file__).parent))

from small_models import FAMILIES, prompts_of, trained
from small_tokenizers import unicode_strings

from palestra.gguf.write import write_gguf
from palestra.models.loading import load_model


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_exported_loads_as_the_same_model_and_tokenizer(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))
    model, tokenizer = trained(family)
    path = write_gguf(model.state_dict(), model.config, tokenizer, tmp_path / "m.gguf", type="f32")
    loaded = load_model(str(path), dtype="float32", device="cpu")
    for prompt in prompts_of(tokenizer)[-4:]:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits, atol=2e-4, rtol=1e-4)
    texts = [*unicode_strings(200), "<|im_start|>user\n the lamp<|im_end|>\n  and <|im_end|>\n"]
    if family.startswith("qwen"):  # Qwen's own tokenizers compose letters and accents first, these small ones do not
        texts = [unicodedata.normalize("NFC", text) for text in texts]
    different = [text for text in texts if loaded.tokenizer(text).input_ids != tokenizer(text).input_ids]
    assert different == []
