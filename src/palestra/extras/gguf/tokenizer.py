"""A fast Hugging Face tokenizer <-> the metadata of a GGUF file: the same ids for the same text in both.

transformers' own reader (`from_pretrained(gguf_file=…)`) splits `<tool_call>` of Qwen2.5 into several tokens, computes
other tokens for Gemma and Llama 3, and takes 5 to 20 times as long.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from palestra.core.errors import InputError, UnreadableFileError, UnsupportedError
from palestra.extras.gguf.file import GgufFile

# transformers' name of a special token -> the GGUF key of its id
_SPECIAL_IDS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_MAX_TOKEN_CHARS = 2048
_TOKENIZER_JSON = "tokenizer.huggingface.json"  # written if the other keys do not give the same tokenizer back
_SPACE = "▁"  # how SentencePiece writes a space
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
# Tokens that are text of an answer: programs must show them even if the tokenizer calls them special.
_CONTENT = {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"}
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "</s>")
# Phi-3 drops white space after all special tokens but these. GGUF has no key for that: llama.cpp goes by the model's
# name.
_PHI3 = re.compile("phi-?3", re.IGNORECASE)
_PHI3_KEEPS_SPACE = {"<unk>", "<s>", "<|endoftext|>"}


# How byte-level BPE splits text before it merges, by llama.cpp's names

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_REGEX = _WORDS + r"\p{N}{1,3}" + _REST
_QWEN2 = _WORDS + r"\p{N}" + _REST
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|"
)
_CASED_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _CASED % ("", "") + r"\p{N}" + _CASED_REST
_GPT4O = _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?") + r"\p{N}{1,3}" + _CASED_REST

# No pre-tokenizer of llama.cpp splits like that of palestra/tiny; `default` comes close (`_match_mixed_tokens_first`).
_TINY_REGEX = (
    r'\n?\{"name": "|", "arguments": \{\}\}\n?|", "arguments": \{"|": "?|"?\}\}\n?|"?, "|\d|\p{L}+|[^\s\p{L}\d]+|\s+'
)
_TINY_APPROXIMATION = "default"


class PreTokenizer(NamedTuple):
    """One rule to split text. Without a regex it is that of GPT-2, which tokenizers has built in."""

    names: tuple[str, ...]  # values of tokenizer.ggml.pre that mean the same; the first one is written
    regex: str | None = None
    single_digits: bool = False
    ignore_merges: bool = False  # a word in the vocabulary is one token, whatever the merges say
    nfc: bool = False  # text is composed first; llama.cpp does not do this


PRE_TOKENIZERS = (
    PreTokenizer(("gpt-2", "phi-2", "mpt", "olmo")),
    PreTokenizer(("smollm", "starcoder", "refact", "command-r", "codeshell"), single_digits=True),
    PreTokenizer(("llama-bpe", "llama3", "llama-v3"), _LLAMA3_REGEX, ignore_merges=True),
    PreTokenizer(("dbrx",), _LLAMA3_REGEX),
    PreTokenizer(("qwen2", "deepseek-r1-qwen"), _QWEN2, nfc=True),
    PreTokenizer(("tekken",), _TEKKEN, ignore_merges=True),
    PreTokenizer(("gpt-4o",), _GPT4O),
)


def tokenizer_from_gguf(file: GgufFile) -> Any:
    """The file's tokenizer, with its special tokens and chat template."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise UnreadableFileError(f"{file.path} has no tokenizer.ggml.tokens; give a file with its tokenizer in it")
    if (longest := max(map(len, tokens))) > _MAX_TOKEN_CHARS:
        raise file.corrupt(f"a token has {longest} characters, expected at most {_MAX_TOKEN_CHARS}")
    ids = {name: file.metadata.get(key) for name, key in _SPECIAL_IDS.items()}
    special = {name: tokens[i] for name, i in ids.items() if isinstance(i, int) and 0 <= i < len(tokens)}
    kind, tokenizer_json = file.metadata.get("tokenizer.ggml.model"), file.metadata.get(_TOKENIZER_JSON)
    if tokenizer_json is not None:
        try:
            backend = Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # tokenizers raises nothing more specific
            raise file.corrupt(f"its {_TOKENIZER_JSON} cannot be read ({error})") from error
    elif kind in ("gpt2", "llama"):
        backend = _byte_level(file, tokens) if kind == "gpt2" else _sentencepiece(file, tokens, special)
        _add_special_tokens(backend, file, tokens, special)
    else:
        raise UnsupportedError(f"{file.path} has a {kind!r} tokenizer; only gpt2 (BPE) and llama are supported")
    context = file.number("context_length", int, 1 << 30)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=context, clean_up_tokenization_spaces=False, **special
    )
    template = file.metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise file.corrupt("tokenizer.chat_template is not a string")
    tokenizer.chat_template = template
    return tokenizer


def _byte_level(file: GgufFile, tokens: list[str]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = file.metadata.get("tokenizer.ggml.pre", "gpt-2")
    pre = next((row for row in PRE_TOKENIZERS if name in row.names), None)
    if pre is None:
        names = [name for row in PRE_TOKENIZERS for name in row.names]
        raise UnsupportedError(
            f"{file.path} has the pre-tokenizer {name!r}, which is not supported; supported are "
            f"{', '.join(names)}. Give the model's Hugging Face folder instead."
        )
    index = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in file.metadata.get("tokenizer.ggml.merges", [])]
    backend = Tokenizer(models.BPE(index, merges, ignore_merges=pre.ignore_merges))
    steps: list[Any] = [pre_tokenizers.Split(Regex(pre.regex), behavior="isolated")] if pre.regex else []
    steps += [pre_tokenizers.Digits(individual_digits=True)] if pre.single_digits else []
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.regex is None)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, byte_level])
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: GgufFile, tokens: list[str], special: Mapping[str, str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = file.metadata.get("tokenizer.ggml.scores", [])
    if len(scores) != len(tokens):
        raise file.corrupt(f"it has {len(tokens)} tokens and {len(scores)} scores")
    index = {token: token_id for token_id, token in enumerate(tokens)}
    ranked = []  # scores instead of merges: the higher the score of a token, the earlier its parts merge
    for token, score in zip(tokens, scores, strict=True):
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        ids = sorted((index[a], index[b]) for a, b in pairs if a in index and b in index)
        ranked += [(-score, (tokens[a], tokens[b])) for a, b in ids]
    merges = [pair for _, pair in sorted(ranked, key=lambda row: row[0])]
    unknown = special.get("unk_token", tokens[0])
    backend = Tokenizer(models.BPE(index, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _add_special_tokens(backend: Any, file: GgufFile, tokens: list[str], special: Mapping[str, str]) -> None:
    """Control and user-defined tokens, which are matched before text is split; those added before and after text."""
    from gguf import TokenType
    from tokenizers import AddedToken, processors

    strips = bool(_PHI3.search(str(file.metadata.get("general.name"))))
    for kind, add in ((TokenType.CONTROL, backend.add_special_tokens), (TokenType.USER_DEFINED, backend.add_tokens)):
        types = file.metadata.get("tokenizer.ggml.token_type", [])
        added = [token for token, token_type in zip(tokens, types, strict=False) if token_type == kind]
        rstrip = {token: strips and token not in _PHI3_KEEPS_SPACE for token in added}
        add([AddedToken(t, normalized=False, special=kind == TokenType.CONTROL, rstrip=rstrip[t]) for t in added])
    is_sentencepiece = file.metadata.get("tokenizer.ggml.model") == "llama"
    has_bos = file.metadata.get("tokenizer.ggml.add_bos_token", is_sentencepiece)
    has_eos = file.metadata.get("tokenizer.ggml.add_eos_token", False)
    bos = [special["bos_token"]] if has_bos and "bos_token" in special else []
    eos = [special["eos_token"]] if has_eos and "eos_token" in special else []
    if bos or eos:
        backend.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A", *eos],
            pair=[*bos, "$A", *eos, *bos, "$B", *eos],
            special_tokens=[(token, backend.token_to_id(token)) for token in {*bos, *eos}],
        )


def tokenizer_to_gguf(tokenizer: Any, rows: int) -> dict[str, Any]:
    """The metadata of a tokenizer for a model whose embedding has `rows` rows."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedError(
            f"{type(tokenizer).__name__} has no tokenizer.json, which GGUF needs for its vocabulary; "
            "load it with AutoTokenizer and save it again as a fast tokenizer"
        )
    parts = json.loads(backend.to_str())
    model, steps = parts["model"], _steps(parts["pre_tokenizer"])
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
    if model["type"] != "BPE" or not (is_byte_level or model.get("byte_fallback")):
        raise UnsupportedError(
            f"a {model['type']} tokenizer cannot be written as GGUF; BPE tokenizers that are byte-level or have byte "
            "fallback can"
        )
    tokens, types = _tokens_and_types(tokenizer, parts, rows)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    more: dict[str, Any] = {}
    if is_byte_level:
        kind, pre = "gpt2", _pre_tokenizer(steps, model.get("ignore_merges", False))
        if merges:  # GGUF has no empty arrays
            more["tokenizer.ggml.merges"] = merges
        if pre == _TINY_APPROXIMATION:
            more[_TOKENIZER_JSON] = backend.to_str()
            _match_mixed_tokens_first(tokenizer, model["vocab"], tokens, types)
    else:
        kind, pre = "llama", "default"
        more["tokenizer.ggml.scores"] = _scores(tokens, types, merges)
        more["tokenizer.ggml.add_space_prefix"] = any(
            step["type"] == "Prepend" or step.get("prepend_scheme") in ("always", "first")
            for step in (*_steps(parts["normalizer"]), *steps)
        )
    ids = {key: getattr(tokenizer, f"{name}_id") for name, key in _SPECIAL_IDS.items()}
    vocab = tokenizer.get_vocab()
    end = next((vocab[text] for text in _TURN_ENDS if text in vocab), None)
    ids["tokenizer.ggml.eot_token_id"] = None if end == tokenizer.eos_token_id else end
    sample = tokenizer("a").input_ids
    return {
        "tokenizer.ggml.model": kind,  # "gpt2": byte-level BPE by merges; "llama": SentencePiece by scores
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(token_type) for token_type in types],
        "tokenizer.ggml.add_bos_token": bool(sample) and sample[0] == tokenizer.bos_token_id,
        "tokenizer.ggml.add_eos_token": bool(sample) and sample[-1] == tokenizer.eos_token_id,
        "tokenizer.chat_template": chat_template(tokenizer),
        **{key: token_id for key, token_id in ids.items() if token_id is not None},
        **more,
    }


def chat_template(tokenizer: Any) -> str:
    """The tokenizer's chat template, without which the model could not be prompted as it was trained."""
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("default")
    if not template:
        raise InputError(
            "the tokenizer has no chat template, so programs could not prompt the exported model as it was trained; "
            "put a chat_template.jinja into the model's folder"
        )
    return str(template)


def model_name(name: str, tokenizer: Any) -> str:
    """The model's name, changed so that llama.cpp drops white space after special tokens if the tokenizer does."""
    strips = any(token.rstrip for token in tokenizer.added_tokens_decoder.values())
    if strips and {*_PHI3_KEEPS_SPACE, "</s>"} <= set(tokenizer.get_vocab()):
        return name if "phi-3" in name.lower() else f"{name} (phi-3)"
    return _PHI3.sub("phi 3", name)


def _tokens_and_types(tokenizer: Any, parts: Mapping[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """One token for each row of the embedding: rows without one get a placeholder, tokens without a row are dropped."""
    from gguf import TokenType

    model = parts["model"]
    tokens, types = [f"[PAD{i}]" for i in range(rows)], [TokenType.UNUSED] * rows
    for text, token_id in model["vocab"].items():
        if token_id < rows:
            tokens[token_id] = text
            is_byte = bool(model.get("byte_fallback")) and _BYTE.fullmatch(text)
            types[token_id] = TokenType.BYTE if is_byte else TokenType.NORMAL
    for token in parts["added_tokens"]:
        token_id = token["id"]
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


def _steps(part: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer, whether it is a single one or a sequence."""
    return list(part.get("pretokenizers") or part.get("normalizers") or [part]) if part else []


def _pre_tokenizer(steps: list[Mapping[str, Any]], ignore_merges: bool) -> str:
    """llama.cpp's name for the steps of a pre-tokenizer, as tokenizer.json has them."""
    regexes = [step["pattern"].get("Regex", "") for step in steps if step["type"] == "Split"]
    regexes += [None for step in steps if step["type"] == "ByteLevel" and step.get("use_regex", True)]
    digits = [step["individual_digits"] for step in steps if step["type"] == "Digits"]
    if regexes == [_TINY_REGEX] and digits in ([], [True]):
        return _TINY_APPROXIMATION
    for row in PRE_TOKENIZERS:
        if (regexes, digits, ignore_merges) == ([row.regex], [True] * row.single_digits, row.ignore_merges):
            return row.names[0]
    splits = [step.get("pattern", step["type"]) for step in steps]
    raise UnsupportedError(
        f"llama.cpp has no pre-tokenizer that splits like this one: {splits}; supported are those of GPT-2, "
        "SmolLM2, Llama 3, Qwen 2/3, Mistral (tekken), GPT-4o/Phi-4 and palestra/tiny"
    )


def _match_mixed_tokens_first(tokenizer: Any, vocab: Mapping[str, int], tokens: list[str], types: list[int]) -> None:
    """Make the tokens of palestra/tiny that mix punctuation with white space user-defined.

    llama.cpp's `default` would split them; user-defined tokens are matched before it splits.
    """
    from gguf import TokenType

    for token_id in vocab.values():
        text = tokenizer.decode([token_id])
        is_mixed = re.search(r"\s", text) and not text.isspace()
        if is_mixed and tokenizer(text, add_special_tokens=False).input_ids == [token_id]:
            tokens[token_id], types[token_id] = text, TokenType.USER_DEFINED


def _scores(tokens: list[str], types: list[int], merges: list[str]) -> list[float]:
    """SentencePiece merges the neighbours whose joint token scores highest: the rank of each merge, negated."""
    from gguf import TokenType

    rank_of: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        rank_of.setdefault(merge.replace(" ", "", 1), rank)
    unmerged = float(-len(merges) - 1)
    return [
        -float(rank_of[token]) if kind == TokenType.NORMAL and token in rank_of else unmerged
        for token, kind in zip(tokens, types, strict=True)
    ]
