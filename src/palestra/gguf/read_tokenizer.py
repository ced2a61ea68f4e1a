"""A GGUF file's vocabulary -> a fast tokenizer, the same ids for the same text."""

from __future__ import annotations

import re
from typing import Any

from palestra.core.errors import PalestraError
from palestra.gguf.file import GgufFile

_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF
_KEEP_BLANKS = ("<unk>", "<s>", "<|endoftext|>")

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _LETTERS + r"\p{N}{1,3}" + _REST
_QWEN2 = _LETTERS + r"\p{N}" + _REST

# `tokenizer.ggml.pre` -> how text is cut before merging: a pattern, GPT-2's own, or GPT-2's with single digits
_CUTS: dict[str, str] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), "gpt-2"),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), "digits"),
}


def tokenizer_of(file: GgufFile) -> Any:
    """The file's tokenizer, with its special tokens and chat template."""
    from transformers import PreTrainedTokenizerFast

    tokens = list(file.metadata.get("tokenizer.ggml.tokens") or ())
    if not tokens:
        raise PalestraError(f"{file.path} has no tokenizer.ggml.tokens; give a file with its tokenizer in it")
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise PalestraError(
            f"{file.path} has a tokenizer of the kind {kind!r}; known are gpt2 (byte-level BPE) "
            "and llama (SentencePiece)"
        )
    backend = _byte_level(file, tokens) if kind == "gpt2" else _sentencepiece(file, tokens)
    _add_special(backend, file, tokens)
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and 0 <= index < len(tokens):
            special[f"{name}_token"] = tokens[index]
    _add_bos(backend, file, special.get("bos_token"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=int(file.own("context_length", 1 << 30)),
        clean_up_tokenization_spaces=False,
        **special,
    )
    tokenizer.chat_template = file.metadata.get("tokenizer.chat_template")
    return tokenizer


def _byte_level(file: GgufFile, tokens: list[str]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = file.metadata.get("tokenizer.ggml.pre", "gpt-2")
    cut = _CUTS.get(pre)
    if cut is None:
        raise PalestraError(
            f"{file.path}: text is cut by the rule {pre!r}, which is not known here; known are {', '.join(_CUTS)}. "
            "Give its Hugging Face folder instead."
        )
    merges = [tuple(merge.split(" ", 1)) for merge in file.metadata.get("tokenizer.ggml.merges") or ()]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=cut is _LLAMA3))
    if cut in ("gpt-2", "digits"):
        by_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        digits = [pre_tokenizers.Digits(individual_digits=True)] if cut == "digits" else []
        backend.pre_tokenizer = pre_tokenizers.Sequence([*digits, by_words])
    else:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(cut), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    if cut is _QWEN2:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: GgufFile, tokens: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = list(file.metadata.get("tokenizer.ggml.scores") or ())
    if len(scores) != len(tokens):
        raise PalestraError(f"{file.path} has {len(tokens)} tokens and {len(scores)} scores; the file is broken")
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = _merges(tokens, scores, vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True))
    leading = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if leading else spaces
    strip = [decoders.Strip(" ", 1, 0)] if leading else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _merges(tokens: list[str], scores: list[float], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece keeps no merges: a pair merges as early as the score of what it makes is high."""
    ranked = []
    for token, score in zip(tokens, scores, strict=True):
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(a, b) for a, b in pairs if a in vocabulary and b in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        ranked += [(-score, pair) for pair in known]
    ranked.sort(key=lambda row: row[0])
    return [pair for _, pair in ranked]


def _add_special(backend: Any, file: GgufFile, tokens: list[str]) -> None:
    from tokenizers import AddedToken

    types = list(file.metadata.get("tokenizer.ggml.token_type") or ())
    # Phi-3's special tokens swallow the blanks behind them. GGUF has no field for it: llama.cpp, too, goes by the name
    strips = bool(re.search("phi-?3", str(file.metadata.get("general.name")), re.IGNORECASE))
    special, added = list[Any](), list[Any]()
    for token, kind in zip(tokens, types, strict=False):
        if kind in (_CONTROL, _USER_DEFINED):
            rstrip = strips and token not in _KEEP_BLANKS
            is_control = kind == _CONTROL
            text = AddedToken(token, normalized=False, special=is_control, rstrip=rstrip)
            (special if is_control else added).append(text)
    backend.add_special_tokens(special)
    backend.add_tokens(added)


def _add_bos(backend: Any, file: GgufFile, bos: str | None) -> None:
    """The beginning-of-sequence token before plain text, where the file asks for it."""
    from tokenizers import processors

    default = file.metadata.get("tokenizer.ggml.model") == "llama"
    if bos is not None and file.metadata.get("tokenizer.ggml.add_bos_token", default):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, backend.token_to_id(bos))]
        )
