"""The table of pre-tokenizers: how byte-level BPE splits text before merging, under llama.cpp's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _WORDS + r"\p{N}{1,3}" + _REST
_QWEN2 = _WORDS + r"\p{N}" + _REST
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|"
)
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _CASED % ("", "") + r"\p{N}" + _CASED_REST
_GPT4O = _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?") + r"\p{N}{1,3}" + _CASED_REST

# No pre-tokenizer of llama.cpp splits like that of palestra/tiny. `default` comes close: see `tokenizer.py`.
TINY_REGEX = (
    r'\n?\{"name": "|", "arguments": \{\}\}\n?|", "arguments": \{"|": "?|"?\}\}\n?|"?, "|\d|\p{L}+|[^\s\p{L}\d]+|\s+'
)
TINY_APPROXIMATION = "default"


@dataclass(frozen=True)
class PreTokenizer:
    """One rule to split text. Without a regex it is that of GPT-2, which tokenizers has built in."""

    names: tuple[str, ...]  # values of tokenizer.ggml.pre that mean the same; the first one is written
    regex: str | None = None
    single_digits: bool = False
    ignore_merges: bool = False  # a word that is in the vocabulary is taken whole, whatever the merges say
    nfc: bool = False  # text is composed first; llama.cpp does not do this

    def steps(self) -> list[Any]:
        from tokenizers import Regex, pre_tokenizers

        split = [pre_tokenizers.Split(Regex(self.regex), behavior="isolated")] if self.regex else []
        digits = [pre_tokenizers.Digits(individual_digits=True)] if self.single_digits else []
        return [*split, *digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.regex is None)]


PRE_TOKENIZERS = (
    PreTokenizer(("gpt-2", "phi-2", "mpt", "olmo")),
    PreTokenizer(("smollm", "starcoder", "refact", "command-r", "codeshell"), single_digits=True),
    PreTokenizer(("llama-bpe", "llama3", "llama-v3"), _LLAMA3, ignore_merges=True),
    PreTokenizer(("dbrx",), _LLAMA3),
    PreTokenizer(("qwen2", "deepseek-r1-qwen"), _QWEN2, nfc=True),
    PreTokenizer(("tekken",), _TEKKEN, ignore_merges=True),
    PreTokenizer(("gpt-4o",), _GPT4O),
)


def pre_tokenizer_named(name: str) -> PreTokenizer | None:
    return next((row for row in PRE_TOKENIZERS if name in row.names), None)


def name_of_steps(steps: list[Mapping[str, Any]], ignore_merges: bool) -> str | None:
    """llama.cpp's name for the steps of a pre-tokenizer, as tokenizer.json has them; None where it has none."""
    regexes = [step["pattern"].get("Regex", "") for step in steps if step["type"] == "Split"]
    digits = [step["individual_digits"] for step in steps if step["type"] == "Digits"]
    gpt2_regex = any(step["type"] == "ByteLevel" and step.get("use_regex", True) for step in steps)
    if len(regexes) + gpt2_regex != 1 or digits not in ([], [True]):
        return None
    if regexes == [TINY_REGEX]:
        return TINY_APPROXIMATION
    shape = (regexes[0] if regexes else None, bool(digits), ignore_merges)
    return next((r.names[0] for r in PRE_TOKENIZERS if (r.regex, r.single_digits, r.ignore_merges) == shape), None)
