"""Call formats of special tokens: gpt-oss (harmony), Gemma 4, FunctionGemma and LFM2: parsers and writers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from palestra.models.chat.calls_json import Calls, Found, Schemas, Unreadable, dumps, named_call, read_calls, write_call
from palestra.models.chat.calls_xml import blocks, schema_of, typed

LFM_OPEN, LFM_CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_HARMONY_END = re.compile(r"<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|\Z")
_RECIPIENT = re.compile(r"to=(?:functions\.)?(?P<name>[^\s<]+)")
_GEMMA_NAME = re.compile(r"\s*call:(?P<name>[\w.-]+)\s*(?=\{)")
_GEMMA_WORD = re.compile(r"[^,{}\[\]]*")
_GEMMA_KEY = re.compile(r"(?P<key>[^:{}\[\],]+):")
_SPACE = re.compile(r"\s*")


def find_harmony(text: str, schemas: Schemas) -> Found:
    """A message in the commentary channel with a recipient is a call; one without, or the final one, is text."""
    parts, calls, position, tag = list[str](), list[Any](), 0, "<|message|>"
    if tag not in text:
        return text, []
    while (middle := text.find(tag, position)) >= 0:
        start = max(position, *(text.rfind(each, position, middle) for each in ("<|start|>", "<|end|>")))
        end = _HARMONY_END.search(text, middle)
        assert end is not None
        body, position = text[middle + len(tag) : end.start()].strip(), end.end()
        if recipient := _RECIPIENT.search(text, start, middle):
            calls.append(named_call(recipient["name"], body or "{}"))
        else:
            parts.append(body)
    return "\n".join(filter(None, parts)), calls


def write_harmony(calls: Calls) -> str:
    written = (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{dumps(dict(arguments))}<|call|>"
        for name, arguments in calls
    )
    return "<|start|>assistant".join(written)


def find_gemma(text: str, schemas: Schemas, opening: str, closing: str, quote: str) -> Found:
    """`call:name{key:value}` between two tokens. Strings stand between two `quote` tokens."""
    parts, calls, position = list[str](), list[Any](), 0
    while (start := text.find(opening, position)) >= 0:
        parts.append(text[position:start])
        position = start + len(opening)
        named = _GEMMA_NAME.match(text, position)
        try:
            if named is None:
                raise ValueError(f"{opening} is not followed by call:name{{")
            value, end = _gemma_value(text, named.end(), quote)
            arguments = {  # FunctionGemma's template writes numbers and objects as strings, too
                key: typed(each, schema_of(schemas, named["name"], key)) if isinstance(each, str) else each
                for key, each in value.items()
            }
            calls.append({"name": named["name"], "arguments": arguments})
            behind = _after_space(text, end)
            position = behind + len(closing) if text.startswith(closing, behind) else end
        except (ValueError, RecursionError) as error:
            calls.append(Unreadable(f"the tool call cannot be read ({error})", named["name"] if named else ""))
            close = text.find(closing, position)
            position = close + len(closing) if close >= 0 else len(text)
    return "".join([*parts, text[position:]]), calls


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
            name, at = key["key"].strip(), key.end()
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
    at = _after_space(text, at)
    if text.startswith(",", at):
        return _after_space(text, at + 1)
    if not text.startswith(close, at):
        raise ValueError(f"expected a comma or {close}")
    return at


def _after_space(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]


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
