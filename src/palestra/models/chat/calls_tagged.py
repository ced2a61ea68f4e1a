"""Call formats of tags and special tokens: parsers and writers. The tool's JSON schema gives each argument its type."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

from palestra.models.chat.calls_json import named_call, read_calls, write_call
from palestra.models.chat.toolcalls import TOOL_CALL, Calls, Found, Schemas, Unreadable, dumps

_QWEN_CALL = re.compile(r"<function=(?P<name>[^<>\n]*)>(?P<body>.*?)(?:</function>|\Z)", re.DOTALL)
_QWEN_ARGUMENT = re.compile(r"<parameter=(?P<key>[^<>]*)>(?P<value>.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_GLM_ARGUMENT = re.compile(
    r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>(?P<value>.*?)(?:(?P<end></arg_value>)|\Z)", re.DOTALL
)
_INVOKE = re.compile(
    r'<(?P<tag>[^<>\s]*)invoke name="(?P<name>[^"]*)">(?P<body>.*?)(?:</(?P=tag)invoke>|\Z)', re.DOTALL
)
_INVOKE_ARGUMENT = re.compile(
    r'<(?P<tag>[^<>\s]*)parameter name="(?P<key>[^"]*)"(?: string="(?P<is_text>\w+)")?>'
    r"(?P<value>.*?)(?:</(?P=tag)parameter>|\Z)",
    re.DOTALL,
)
_WORDS = {"true": True, "false": False, "null": None, "none": None}
LFM_OPEN, LFM_CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
_HARMONY_END = re.compile(r"<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|\Z")
_RECIPIENT = re.compile(r"to=(?:functions\.)?(?P<name>[^\s<]+)")
_GEMMA_NAME = re.compile(r"\s*call:(?P<name>[\w.-]+)\s*(?=\{)")
_GEMMA_WORD = re.compile(r"[^,{}\[\]]*")
_GEMMA_KEY = re.compile(r"(?P<key>[^:{}\[\],]+):")
_SPACE = re.compile(r"\s*")


def typed(text: str, schema: Mapping[str, Any] | None) -> Any:
    """An argument's text as a value of the type that its schema asks for; without a schema, JSON if it is any.

    >>> typed("42", {"type": "string"}), typed("42", {"type": "integer"}), typed("True", {"type": "boolean"})
    ('42', 42, True)
    """
    types = types_of(schema)
    if "string" in types:
        return None if "null" in types and text.strip().lower() in ("null", "none") else text
    body = text.strip()
    if body.lower() in _WORDS:
        return _WORDS[body.lower()]
    value: Any = text
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        if body.startswith(("{", "[")):  # Python notation, which templates write with Jinja's `string` filter
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                value = ast.literal_eval(body)
    return text if isinstance(value, str) and not types else value


def types_of(schema: Mapping[str, Any] | None) -> set[str]:
    """The JSON types that a schema allows; empty if it does not restrict them."""
    if not isinstance(schema, Mapping):
        return set()
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return {"string"} if all(isinstance(value, str) for value in values) else set()
    types: set[str] = set()
    for key in ("anyOf", "oneOf"):
        for each in schema.get(key) or ():
            types |= types_of(each)
    kind = schema.get("type")
    return types | ({kind} if isinstance(kind, str) else set(kind or ()))


def _schema_of(schemas: Schemas, name: str, argument: str) -> Mapping[str, Any] | None:
    properties = (schemas.get(name) or {}).get("properties")
    return properties.get(argument) if isinstance(properties, Mapping) else None


def _typed_call(name: str, arguments: Iterable[tuple[str, str]], schemas: Schemas) -> dict[str, Any]:
    return {"name": name, "arguments": {key: typed(text, _schema_of(schemas, name, key)) for key, text in arguments}}


def _blocks(text: str, opening: str, closing: str) -> tuple[str, list[str]]:
    """The text outside of the tags, and the text between each pair of them."""
    parts, bodies, position = list[str](), list[str](), 0
    while (start := text.find(opening, position)) >= 0:
        parts.append(text[position:start])
        close = text.find(closing, start + len(opening))
        close = close if close >= 0 else len(text)
        bodies.append(text[start + len(opening) : close])
        position = close + len(closing)
    return "".join([*parts, text[position:]]), bodies


def _find_calls(text: str, opening: str, closing: str, read: Callable[[str], list[Any]], missing: str) -> Found:
    """Calls by `read` from the text between two tags; it is an error if there are none."""
    outside, bodies = _blocks(text, opening, closing)
    return outside, [call for body in bodies for call in read(body) or [Unreadable(missing)]]


def find_qwen(text: str, schemas: Schemas, opening: str, closing: str) -> Found:
    """`<function=name><parameter=key>value</parameter></function>` between two tags."""

    def arguments(body: str) -> Iterable[tuple[str, str]]:
        for each in _QWEN_ARGUMENT.finditer(body):  # templates put a line break on either side of a value
            yield each["key"].strip(), each["value"].removeprefix("\n").removesuffix("\n")

    def read(body: str) -> list[Any]:
        return [_typed_call(c["name"].strip(), arguments(c["body"]), schemas) for c in _QWEN_CALL.finditer(body)]

    return _find_calls(text, opening, closing, read, f"{opening} holds no <function=name>…</function>")


def write_qwen(calls: Calls, opening: str, closing: str, line: str = "\n") -> str:
    """`line` is what stands on either side of a value."""

    def one(name: str, arguments: Mapping[str, Any]) -> str:
        written = "".join(
            f"<parameter={key}>{line}{_as_text(value)}{line}</parameter>\n" for key, value in arguments.items()
        )
        return f"{opening}\n<function={name}>\n{written}</function>\n{closing}"

    return "\n".join(one(*call) for call in calls)


def find_glm(text: str, schemas: Schemas) -> Found:
    """A name, then `<arg_key>key</arg_key><arg_value>value</arg_value>`, between two tags."""

    def read(body: str) -> list[Any]:
        name = body.partition("<arg_key>")[0].strip()
        if not re.fullmatch(r"[\w.:-]+", name):
            return []
        pairs = [(each["key"].strip(), each["value"]) for each in _GLM_ARGUMENT.finditer(body) if each["end"]]
        return [_typed_call(name, pairs, schemas)]

    return _find_calls(text, *TOOL_CALL, read, "<tool_call> is not followed by the name of a tool")


def write_glm(calls: Calls) -> str:
    def one(name: str, arguments: Mapping[str, Any]) -> str:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_as_text(value)}</arg_value>\n" for key, value in arguments.items()
        )
        return f"<tool_call>{name}\n{pairs}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def find_invoke(text: str, schemas: Schemas, opening: str, closing: str) -> Found:
    """`<invoke name="f"><parameter name="k">v</parameter></invoke>` with any prefix of the tags (MiniMax, DeepSeek)."""

    def value_of(name: str, argument: re.Match[str]) -> Any:
        schema = _schema_of(schemas, name, argument["key"])
        if argument["is_text"] is not None:
            schema = {"type": "string" if argument["is_text"] == "true" else "object"}
        return typed(argument["value"].removeprefix("\n").removesuffix("\n"), schema)

    def read(body: str) -> list[Any]:
        calls = [(call["name"], _INVOKE_ARGUMENT.finditer(call["body"])) for call in _INVOKE.finditer(body)]
        return [
            {"name": name, "arguments": {a["key"]: value_of(name, a) for a in arguments}} for name, arguments in calls
        ]

    return _find_calls(text, opening, closing, read, f'{opening} holds no <invoke name="…">')


def write_invoke(calls: Calls, opening: str, closing: str, prefix: str = "") -> str:
    def argument(key: str, value: Any) -> str:
        mark = f' string="{"true" if isinstance(value, str) else "false"}"' if prefix else ""
        return f'<{prefix}parameter name="{key}"{mark}>{_as_text(value)}</{prefix}parameter>\n'

    written = "".join(
        f'<{prefix}invoke name="{name}">\n{"".join(argument(*each) for each in arguments.items())}</{prefix}invoke>\n'
        for name, arguments in calls
    )
    return f"{opening}\n{written}{closing}"


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


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
                key: typed(each, _schema_of(schemas, named["name"], key)) if isinstance(each, str) else each
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
    if not text.startswith(("{", "["), at):
        word = _GEMMA_WORD.match(text, at)
        assert word is not None
        return typed(word[0].strip(), None), word.end()
    is_object, items, at = text[at] == "{", list[tuple[str, Any]](), at + 1
    close = "}" if is_object else "]"
    while not text.startswith(close, at):
        key, at = _gemma_key(text, at, quote) if is_object else ("", at)
        value, at = _gemma_value(text, at, quote)
        items.append((key, value))
        at = _after_space(text, at)
        if text.startswith(",", at):
            at = _after_space(text, at + 1)
        elif not text.startswith(close, at):
            raise ValueError(f"expected a comma or {close}")
    return (dict(items) if is_object else [value for _, value in items]), at + 1


def _gemma_key(text: str, at: int, quote: str) -> tuple[str, int]:
    """The key that begins at `at`, and where its value begins."""
    if text.startswith(quote, at):
        name, at = _gemma_value(text, at, quote)
        if not text.startswith(":", at):
            raise ValueError("a key is not followed by a colon")
        return name, at + 1
    key = _GEMMA_KEY.match(text, at)
    if key is None:
        raise ValueError("a key is missing")
    return key["key"].strip(), key.end()


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
    outside, bodies = _blocks(text, LFM_OPEN, LFM_CLOSE)
    return outside, [call for body in bodies for call in read_calls(body)]


def write_lfm(calls: Calls) -> str:
    return f"{LFM_OPEN}[{', '.join(write_call(name, arguments) for name, arguments in calls)}]{LFM_CLOSE}"
