"""Models and tokenizers written as GGUF and read back: the same numbers, the same token ids."""

import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gguf", reason="pip install 'palestra[gguf]'")
sys.path.insert(0, str(Path(__file__).parent))

import gguf
from small_models import FAMILIES, prompts_of, sharp
from small_tokenizers import CONVERSATION, CORPUS, LLAMA3, TOOLS, make_byte_level, make_sentencepiece, unicode_strings
from tokenizers import processors

from palestra.core.errors import UnreadableFileError
from palestra.extras.gguf.config import config_to_gguf
from palestra.extras.gguf.export import to_gguf, write_gguf
from palestra.extras.gguf.file import GgufFile
from palestra.extras.gguf.source import open_source
from palestra.extras.gguf.tokenizer import PRE_TOKENIZERS, tokenizer_from_gguf, tokenizer_to_gguf
from palestra.models.loading import load_model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_exported_loads_as_the_same_model_and_tokenizer(family: str, tmp_path: Path) -> None:
    model, tokenizer = sharp(family)
    path = write_gguf(model.state_dict(), model.config, tokenizer, tmp_path / "m.gguf", type="f32")
    loaded = load_model(str(path), dtype="float32", device="cpu")
    for prompt in prompts_of(tokenizer)[-4:]:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits, atol=2e-5, rtol=1e-5)
    texts = [*unicode_strings(200), "<|im_start|>user\n the lamp<|im_end|>\n  and <|im_end|>\n"]
    if family.startswith("qwen"):  # Qwen's own tokenizers compose letters and accents first, these small ones do not
        texts = [unicodedata.normalize("NFC", text) for text in texts]
    assert differences(loaded.tokenizer, tokenizer, texts) == []
    sections = [section for section in vars(gguf.Keys).values() if isinstance(section, type)]
    known = {value for section in sections for value in vars(section).values()}
    written = {*(f"{{arch}}.{key}" for key in config_to_gguf(model.config)), *tokenizer_to_gguf(tokenizer, 480)}
    assert written <= known


def test_the_embedded_model_exported_and_loaded_again_gives_the_same_tokens_and_logits(tiny, tmp_path):
    path = to_gguf(open_source("palestra/tiny"), tmp_path / "tiny.gguf", type="f32")
    loaded = load_model(str(path), dtype="float32", device="cpu")
    conversation = tiny.tokenizer.apply_chat_template(CONVERSATION, tools=TOOLS, tokenize=False)
    assert loaded.tokenizer.apply_chat_template(CONVERSATION, tools=TOOLS, tokenize=False) == conversation
    json_after_punctuation = 'what?"}}\n{"name": "now", "arguments": {}}\n'  # llama.cpp splits this differently
    texts = [conversation, json_after_punctuation, *unicode_strings(1000)]
    assert differences(loaded.tokenizer, tiny.tokenizer, texts) == []
    ids = tiny.tokenizer(conversation, return_tensors="pt").input_ids
    assert loaded.tokenizer.decode(ids[0], skip_special_tokens=True) == tiny.tokenizer.decode(
        ids[0], skip_special_tokens=True
    )
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        assert getattr(loaded.tokenizer, name) == getattr(tiny.tokenizer, name)
    assert loaded.model.generation_config.eos_token_id == tiny.model.generation_config.eos_token_id
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, tiny.model(ids).logits)


def test_a_corrupt_tokenizer_json_is_named(tiny_tokenizer: Any) -> None:
    metadata = {**tokenizer_to_gguf(tiny_tokenizer, len(tiny_tokenizer)), "tokenizer.huggingface.json": "{"}
    with pytest.raises(
        UnreadableFileError, match=r"m\.gguf is corrupt: its tokenizer\.huggingface\.json cannot be read"
    ):
        tokenizer_from_gguf(GgufFile(Path("m.gguf"), metadata, {}))


def pre_tokenized(name: str) -> Any:
    row = next(row for row in PRE_TOKENIZERS if name in row.names)
    return make_byte_level(row.regex, digits=row.single_digits, ignore_merges=row.ignore_merges)


def with_end() -> Any:
    """One that adds an end as well."""
    tokenizer = make_sentencepiece()
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ids)
    return tokenizer


TOKENIZERS: dict[str, Callable[[], Any]] = {
    **{row.names[0]: lambda name=row.names[0]: pre_tokenized(name) for row in PRE_TOKENIZERS},
    "with bos": lambda: make_byte_level(LLAMA3, ignore_merges=True, bos=True),
    "with end": with_end,
    "sentencepiece": make_sentencepiece,
    "sentencepiece without space prefix": lambda: make_sentencepiece(space_prefix=False),
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_tokenizer_that_is_written_is_read_back_with_the_same_ids(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    texts = [unicodedata.normalize("NFC", text) for text in (*unicode_strings(200), *CORPUS, "<|im_start|>a<|im_end|>")]
    assert differences(read_back(tokenizer), tokenizer, texts) == []


def read_back(tokenizer: Any) -> Any:
    return tokenizer_from_gguf(GgufFile(Path("m.gguf"), tokenizer_to_gguf(tokenizer, len(tokenizer)), {}))


def differences(one: Any, other: Any, texts: list[str]) -> list[str]:
    return [text for text in texts if one(text).input_ids != other(text).input_ids]
