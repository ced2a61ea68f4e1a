"""A Hugging Face tokenizer in the terms of llama.cpp: tokens with types, merges or scores, special ids."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from palestra.core.errors import PalestraError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_ENDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|"
)
_CASED_ENDS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# The regex that splits text before merging -> llama.cpp's name of it (where every word is first looked up whole, as
# `ignore_merges` has it, the second name).
_BY_REGEX = {
    f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}{{1,3}}|{_ENDS}": ("dbrx", "llama-bpe"),
    f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}|{_ENDS}": ("qwen2", None),
    _CASED % ("", "") + r"\p{N}|" + _CASED_ENDS: (None, "tekken"),
    _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?") + r"\p{N}{1,3}|" + _CASED_ENDS: ("gpt-4o", None),
}
# palestra/tiny: nothing in llama.cpp splits like it. `default` differs only where text joins punctuation with white
# space, and there `_literals` makes the difference good.
_TINY_REGEX = (
    r'\n?\{"name": "|", "arguments": \{\}\}\n?|", "arguments": \{"|": "?|"?\}\}\n?|"?, "|\d|\p{L}+|[^\s\p{L}\d]+|\s+'
)

# Tokens that stand in the text of an answer: a reader must see them, whatever the tokenizer calls them.
_CONTENT = {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"}
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "</s>")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE = "▁"  # how SentencePiece writes a blank


class TokenType(IntEnum):
    """As GGUF numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """What a GGUF file says of a tokenizer."""

    model: str  # "gpt2": byte-level BPE by merges; "llama": SentencePiece-like by scores
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str] | None
    scores: list[float] | None
    special_ids: dict[str, int]  # bos, eos, eot, unknown, padding
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool | None
    strips_after_special: bool  # some special tokens swallow the white space behind them


def read_vocabulary(tokenizer: Any, rows: int) -> Vocabulary:
    """The vocabulary of a fast tokenizer for a model with `rows` embeddings."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise PalestraError(
            f"{type(tokenizer).__name__} has no tokenizer.json, and GGUF needs its vocabulary; "
            "load it with AutoTokenizer and save it again with a fast tokenizer"
        )
    parts = json.loads(backend.to_str())
    model, added = parts["model"], {token["id"]: token for token in parts["added_tokens"]}
    if model["type"] != "BPE":
        raise PalestraError(f"a {model['type']} tokenizer cannot be written as GGUF; BPE ones can")
    tokens, types = _tokens(tokenizer, model, added, rows)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    byte_level = _is_byte_level(parts)
    scores, prefix, pre = None, None, "default"
    if byte_level:
        pre = _pre_type(parts["pre_tokenizer"], model.get("ignore_merges", False))
        for token_id, text in _literals(tokenizer, model["vocab"], pre).items():
            tokens[token_id], types[token_id] = text, TokenType.USER_DEFINED
    else:
        scores, prefix = _scores(tokens, types, merges), _has_space_prefix(parts)
    sample = tokenizer("a").input_ids
    return Vocabulary(
        "gpt2" if byte_level else "llama",
        pre,
        tokens,
        [int(kind) for kind in types],
        merges if byte_level else None,
        scores,
        _special_ids(tokenizer, model["vocab"], added),
        bool(sample) and sample[0] == tokenizer.bos_token_id,
        bool(sample) and sample[-1] == tokenizer.eos_token_id,
        prefix,
        any(token["rstrip"] for token in added.values()),
    )


def _tokens(
    tokenizer: Any, model: Mapping[str, Any], added: Mapping[int, Mapping[str, Any]], rows: int
) -> tuple[list[str], list[TokenType]]:
    """One token a row of the embedding; rows without a token are filled, tokens without a row left out."""
    tokens, types = [f"[PAD{i}]" for i in range(rows)], [TokenType.UNUSED] * rows
    for text, token_id in model["vocab"].items():
        if token_id < rows:
            tokens[token_id] = text
            is_byte = bool(model.get("byte_fallback")) and _BYTE.fullmatch(text)
            types[token_id] = TokenType.BYTE if is_byte else TokenType.NORMAL
    for token_id, token in added.items():
        if token_id >= rows:
            continue
        tokens[token_id] = token["content"]
        if token["content"] == tokenizer.unk_token:
            types[token_id] = TokenType.UNKNOWN
        elif token["special"] and token["content"] not in _CONTENT:
            types[token_id] = TokenType.CONTROL
        else:
            types[token_id] = TokenType.USER_DEFINED
            tokens[token_id] = token["content"].replace(_SPACE, " ")
    return tokens, types


def _is_byte_level(parts: Mapping[str, Any]) -> bool:
    steps = _steps(parts["pre_tokenizer"])
    if any(step["type"] == "ByteLevel" for step in steps):
        return True
    if parts["model"].get("byte_fallback"):
        return False
    raise PalestraError("this BPE tokenizer is neither byte-level nor has byte fallback; GGUF knows these two")


def _steps(part: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The steps of a tokenizer's part (a normalizer or a pre-tokenizer), whether it is one or a sequence."""
    if part is None:
        return []
    return list(part.get("pretokenizers") or part.get("normalizers") or [part])


def _pre_type(pre_tokenizer: Mapping[str, Any], ignore_merges: bool) -> str:
    """llama.cpp's name of the way in which text is split before merging."""
    steps = _steps(pre_tokenizer)
    regexes = [step["pattern"].get("Regex", "") for step in steps if step["type"] == "Split"]
    digits = [step["individual_digits"] for step in steps if step["type"] == "Digits"]
    own_regex = any(step["type"] == "ByteLevel" and step.get("use_regex", True) for step in steps)
    known: str | None = None
    if not regexes and own_regex and digits in ([], [True]):
        known = "smollm" if digits else "gpt-2"
    elif len(regexes) == 1 and not own_regex and not digits:
        known = "default" if regexes[0] == _TINY_REGEX else _BY_REGEX.get(regexes[0], (None, None))[ignore_merges]
    if known is None:
        raise PalestraError(
            f"llama.cpp has no pre-tokenizer that splits like this one: {regexes or [step['type'] for step in steps]}; "
            "known are those of GPT-2, SmolLM, Llama 3, Qwen 2/3, Mistral (tekken), GPT-4o/Phi-4 and palestra/tiny"
        )
    return known


def _literals(tokenizer: Any, vocab: Mapping[str, int], pre: str) -> dict[int, str]:
    """Tokens of palestra/tiny that join punctuation with white space, as plain text.

    llama.cpp's `default` would split them; as user-defined tokens they are found before it splits.
    """
    if pre != "default":
        return {}
    texts = {token_id: tokenizer.decode([token_id]) for token_id in vocab.values()}
    mixed = {i: text for i, text in texts.items() if re.search(r"\s", text) and not text.isspace()}
    return {i: text for i, text in mixed.items() if tokenizer(text, add_special_tokens=False).input_ids == [i]}


def _scores(tokens: list[str], types: list[TokenType], merges: list[str]) -> list[float]:
    """SentencePiece joins the neighbours whose whole has the best score: the order of the merges, as numbers."""
    rank_of: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        rank_of.setdefault(merge.replace(" ", "", 1), rank)
    unmerged = float(-len(merges) - 1)
    return [
        -float(rank_of[token]) if kind == TokenType.NORMAL and token in rank_of else unmerged
        for token, kind in zip(tokens, types, strict=True)
    ]


def _has_space_prefix(parts: Mapping[str, Any]) -> bool:
    prepends = any(step["type"] == "Prepend" for step in _steps(parts["normalizer"]))
    schemes = [s.get("prepend_scheme") for s in _steps(parts["pre_tokenizer"]) if s["type"] == "Metaspace"]
    return prepends or any(scheme in ("always", "first") for scheme in schemes)


def _special_ids(tokenizer: Any, vocab: Mapping[str, int], added: Mapping[int, Mapping[str, Any]]) -> dict[str, int]:
    ids = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "unknown": tokenizer.unk_token_id,
        "padding": tokenizer.pad_token_id,
    }
    known = {token["content"]: token_id for token_id, token in added.items()} | dict(vocab)
    ends = [known[text] for text in _TURN_ENDS if text in known]
    if ends and ends[0] != tokenizer.eos_token_id:
        ids["eot"] = ends[0]
    return {name: token_id for name, token_id in ids.items() if token_id is not None}
