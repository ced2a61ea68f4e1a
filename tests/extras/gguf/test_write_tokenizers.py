"""Text in llama.cpp becomes the token ids that it becomes in the Hugging Face tokenizer."""

import re
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("xllamacpp")
pytest.importorskip("gguf")
sys.path.insert(0, str(Path(__file__).parent))

from gguf import TokenType
from llama_cpp import LlamaCpp, serve_tokenizer
from small_tokenizers import CORPUS, LLAMA3, QWEN2, make_byte_level, make_sentencepiece, unicode_strings
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from palestra import demo
from palestra.core.errors import UnsupportedError
from palestra.extras.gguf.tokenizer import tokenizer_to_gguf

# The one difference: a piece of a tool call's JSON right after other punctuation. No pre-tokenizer of llama.cpp splits
# text as this tokenizer does; there, the pieces of JSON are matched first, wherever they stand.
AFTER_PUNCTUATION = re.compile(r"""([^\w\s]|_)(": |, "|"?\}\}\n|\n?\{"name": ")""")


def differences(tokenizer: Any, server: LlamaCpp, texts: list[str]) -> list[str]:
    return [text for text in texts if server.tokenize(text) != tokenizer(text, add_special_tokens=False).input_ids]


def conversation(tokenizer: Any, case: dict[str, Any]) -> str:
    call = {"name": "multiply", "arguments": '{"a": 3, "b": 17}'}
    messages = [
        {"role": "system", "content": demo.agent.instructions},
        {"role": "user", "content": case["question"]},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}] * 2},
        {"role": "tool", "content": str(case["total"])},
        {"role": "tool", "content": "no item 'lamp'"},
        {"role": "assistant", "content": f"That is {case['total']}."},
    ]
    tools = [tool.schema for tool in demo.agent.tools]
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))


def test_the_embedded_models_tokens_are_the_same_for_random_strings_and_conversations(tiny_tokenizer, tmp_path):
    # Its tokenizer composes characters first (NFC), which no GGUF can ask of llama.cpp.
    texts = [unicodedata.normalize("NFC", text) for text in unicode_strings(440)]
    texts = [text for text in texts if not AFTER_PUNCTUATION.search(text)][:400]
    assert len(texts) == 400
    texts += [conversation(tiny_tokenizer, case) for case in demo.make_cases(10, held_out=True, seed=3)]
    assert differences(tiny_tokenizer, serve_tokenizer(tiny_tokenizer, tmp_path), texts) == []


KINDS: dict[str, tuple[str, Callable[[], Any]]] = {
    "gpt-2": ("gpt-2", lambda: make_byte_level(None)),
    "smollm": ("smollm", lambda: make_byte_level(None, digits=True)),
    "llama 3": ("llama-bpe", lambda: make_byte_level(LLAMA3, ignore_merges=True, bos=True)),
    "phi 4": ("dbrx", lambda: make_byte_level(LLAMA3)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_tokenizer_is_known_to_llama_cpp(kind: str, tmp_path: Path) -> None:
    pre, make = KINDS[kind]
    tokenizer = make()
    assert tokenizer_to_gguf(tokenizer, len(tokenizer))["tokenizer.ggml.pre"] == pre
    assert differences(tokenizer, serve_tokenizer(tokenizer, tmp_path), [*unicode_strings(150, seed=1), *CORPUS]) == []


def unigram() -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram([("a", 0.0)])))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: make_byte_level("abc|" + QWEN2), r"no pre-tokenizer that splits like this one: .*abc"),
        (unigram, "a Unigram tokenizer cannot be written as GGUF"),
    ],
)
def test_a_tokenizer_that_llama_cpp_does_not_know_is_rejected(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        tokenizer_to_gguf(make(), 480)


def test_tags_of_tool_calls_are_text_and_turn_marks_are_not(tiny_tokenizer: Any) -> None:
    size = len(tiny_tokenizer)
    metadata = tokenizer_to_gguf(tiny_tokenizer, size + 6)
    types = metadata["tokenizer.ggml.token_type"]
    kinds = dict(zip(metadata["tokenizer.ggml.tokens"], types, strict=True))
    assert kinds["<tool_call>"] == kinds["<think>"] == TokenType.USER_DEFINED
    assert kinds["<|im_start|>"] == kinds["<|im_end|>"] == TokenType.CONTROL
    assert types[size:] == [TokenType.UNUSED] * 6
    ids = {key: value for key, value in metadata.items() if key.endswith("_token_id")}
    assert ids == {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.padding_token_id": 0}
    assert metadata["tokenizer.ggml.add_bos_token"] is False


def test_a_beginning_is_added_only_where_the_tokenizer_adds_it() -> None:
    assert tokenizer_to_gguf(make_sentencepiece(), 600)["tokenizer.ggml.add_bos_token"] is True
    assert tokenizer_to_gguf(make_byte_level(), 480)["tokenizer.ggml.add_bos_token"] is False
