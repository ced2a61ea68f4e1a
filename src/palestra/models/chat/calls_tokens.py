"""Call formats of special tokens: gpt-oss (harmony), Gemma 4, FunctionGemma and LFM2: parsers and writers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from palestra.models.chat.calls_json import Calls, Found, Schemas, Unreadable, dumps, named_call, read_calls, write_call
from palestra.models.chat.calls_xml import blocks, schema_of, typed

LFM_OPEN, LFM_CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_HARMONY = re.compile(
    r"(?:<\|start\|>assistant)?(?P<header>(?:(?!<\|start\|>|<\|end\|>|<\|message\|>).)*)<\|message\|>"
    r"(?P<body>.*?)(?P<end><\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|\Z)",
    re.DOTALL,
)
_RECIPIENT = re.compile(r"to=(?:functions\.)?(?P<name>[^\s<]+)")
_GEMMA_NAME = re.compile(r"\s*call:(?P<name>[\w.-]+)\s*(?=\{)")
_GEMMA_WORD = re.compile(r"[^,\]}]*")
_GEMMA_KEY = re.compile(r"\s*(?P<key>[^:{}\[\],]+?)\s*:")


def find_harmony(text: str, schemas: Schemas) -> Found:
    """A message in the commentary channel with a recipient is a call; one without, or the final one, is text."""
    if "<|message|>" not in text:
        return text, []
    parts, calls = list[str](), list[Any]()
    for message in _HARMONY.finditer(text):
        recipient = _RECIPIENT.search(message["header"])
        if recipient is None:
            parts.append(message["body"])
        else:
            calls.append(named_call(recipient["name"], message["body"].strip() or "{}"))
    return "\n".join(part.strip() for part in parts if part.strip()), calls


def write_harmony(calls: Calls) -> str:
    written = (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumps(dict(arguments))}<|call|>"
        for name, arguments in calls
    )
    return "<|start|>assistant".join(written)


def find_gemma(text: str, schemas: Schemas, opening: str, closing: str, quote: str) -> Found:
    """`call:name{key:value}` between two tokens. Strings stand between two `quote` tokens."""
    parts, calls = list[str](), list[Any]()
    while True:
        before, tag, text = text.partition(opening)
        parts.append(before)
        if not tag:
            return "".join(parts), calls
        named = _GEMMA_NAME.match(text)
        try:
            if named is None:
                raise ValueError(f"{opening} is not followed by call:name{{")
            value, end = _gemma_value(text, named.end(), quote)
            arguments = {  # FunctionGemma's template writes numbers and objects as strings, too
                key: typed(each, schema_of(schemas, named["name"], key)) if isinstance(each, str) else each
                for key, each in value.items()
            }
            calls.append({"name": named["name"], "arguments": arguments})
            behind, _, rest = text[end:].partition(closing)
            text = rest if not behind.strip() else text[end:]
        except (ValueError, RecursionError) as error:
            calls.append(Unreadable(f"the tool call cannot be read ({error})", named["name"] if named else ""))
            text = text.partition(closing)[2]


def _gemma_value(text: str, at: int, quote: str) -> tuple[Any, int]:
    """The value that begins at `at`, and where it ends."""
    if text.startswith(quote, at):
        end = text.find(quote, at + len(quote))
        if end < 0:
            raise ValueError(f"a string is not closed with {quote}")
        return text[at + len(quote) : end], end + len(quote)
    if text.startswith("{", at):
        return _gemma_object(text, at + 1, quote)
    if text.startswith("[", at):
        return _gemma_list(text, at + 1, quote)
    word = _GEMMA_WORD.match(text, at)
    assert word is not None
    return typed(word[0].strip(), None), word.end()


def _gemma_object(text: str, at: int, quote: str) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    while not text.startswith("}", at):
        if text.startswith(quote, at):
            name, at = _gemma_value(text, at, quote)
            if not text.startswith(":", at):
                raise ValueError("a key is not followed by a colon")
            at += 1
        else:
            key = _GEMMA_KEY.match(text, at)
            if key is None:
                raise ValueError("a key is missing")
            name, at = key["key"], key.end()
        found[str(name)], at = _gemma_value(text, at, quote)
        at = _after_comma(text, at, "}")
    return found, at + 1


def _gemma_list(text: str, at: int, quote: str) -> tuple[list[Any], int]:
    found: list[Any] = []
    while not text.startswith("]", at):
        value, at = _gemma_value(text, at, quote)
        found.append(value)
        at = _after_comma(text, at, "]")
    return found, at + 1


def _after_comma(text: str, at: int, close: str) -> int:
    while text[at : at + 1].isspace():
        at += 1
    if text.startswith(",", at):
        at += 1
        while text[at : at + 1].isspace():
            at += 1
        return at
    if not text.startswith(close, at):
        raise ValueError(f"expected a comma or {close}")
    return at


def write_gemma(calls: Calls, opening: str, closing: str, quote: str) -> str:
    def value(each: Any) -> str:
        if isinstance(each, str):
            return f"{quote}{each}{quote}"
        if isinstance(each, Mapping):
            items = sorted(each.items()) if quote == '<|"|>' else each.items()  # as Gemma 4's template does
            return "{" + ",".join(f"{key}:{value(item)}" for key, item in items) + "}"
        if isinstance(each, list | tuple):
            return "[" + ",".join(map(value, each)) + "]"
        return dumps(each)

    return "".join(f"{opening}call:{name}{value(arguments)}{closing}" for name, arguments in calls)


def find_lfm(text: str, schemas: Schemas) -> Found:
    """`[name(key=value), …]` between two tokens."""
    outside, bodies = blocks(text, LFM_OPEN, LFM_CLOSE)
    return outside, [call for body in bodies for call in read_calls(body)]


def write_lfm(calls: Calls) -> str:
    return f"{LFM_OPEN}[{', '.join(write_call(name, arguments) for name, arguments in calls)}]{LFM_CLOSE}"
