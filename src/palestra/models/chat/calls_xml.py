"""Call formats whose arguments are tagged text: parsers and writers. The tool's JSON schema gives each its type."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from palestra.models.chat.calls_json import TOOL_CALL, TOOL_CALL_END, Calls, Found, Schemas, Unreadable, dumps

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
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = _python_value(body, text)
    return text if isinstance(value, str) and not types else value


def _python_value(body: str, text: str) -> Any:
    """Parse Python notation, which templates write with Jinja's `string` filter; `text` if it is none."""
    if body[:1] not in ("{", "["):
        return text
    try:
        return ast.literal_eval(body)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text


def types_of(schema: Mapping[str, Any] | None) -> set[str]:
    """The JSON types that a schema allows; empty if it does not restrict them."""
    if not isinstance(schema, Mapping):
        return set()
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return {"string"} if all(isinstance(value, str) for value in values) else set()
    found: set[str] = set()
    for key in ("anyOf", "oneOf"):
        for each in schema.get(key) or ():
            found |= types_of(each)
    kind = schema.get("type")
    return found | ({kind} if isinstance(kind, str) else set(kind or ()))


def schema_of(schemas: Schemas, name: str, argument: str) -> Mapping[str, Any] | None:
    properties = (schemas.get(name) or {}).get("properties")
    return properties.get(argument) if isinstance(properties, Mapping) else None


def _unwrap(value: str) -> str:
    """Remove the one line break that templates put on either side of a value."""
    return value.removeprefix("\n").removesuffix("\n")


def blocks(text: str, opening: str, closing: str) -> tuple[str, list[str]]:
    """The text outside of the tags, and the text between each pair of them."""
    parts, found, position = list[str](), list[str](), 0
    while (start := text.find(opening, position)) >= 0:
        parts.append(text[position:start])
        close = text.find(closing, start + len(opening))
        close = close if close >= 0 else len(text)
        found.append(text[start + len(opening) : close])
        position = close + len(closing)
    return "".join([*parts, text[position:]]), found


def _find_calls(text: str, opening: str, closing: str, read: Callable[[str], list[Any]], missing: str) -> Found:
    """What all formats here share: `read` gives the calls of the text between two tags; none is an error."""
    outside, bodies = blocks(text, opening, closing)
    return outside, [call for body in bodies for call in read(body) or [Unreadable(missing)]]


def find_qwen(text: str, schemas: Schemas, opening: str, closing: str) -> Found:
    """`<function=name><parameter=key>value</parameter></function>` between two tags."""

    def call_of(name: str, body: str) -> dict[str, Any]:
        pairs = [(each["key"].strip(), _unwrap(each["value"])) for each in _QWEN_ARGUMENT.finditer(body)]
        return {"name": name, "arguments": {key: typed(value, schema_of(schemas, name, key)) for key, value in pairs}}

    def read(body: str) -> list[Any]:
        return [call_of(call["name"].strip(), call["body"]) for call in _QWEN_CALL.finditer(body)]

    return _find_calls(text, opening, closing, read, f"{opening} holds no <function=name>…</function>")


def write_qwen(calls: Calls, opening: str, closing: str, line: str = "\n") -> str:
    """`line` is what stands on either side of a value."""

    def one(name: str, arguments: Mapping[str, Any]) -> str:
        written = "".join(
            f"<parameter={key}>{line}{as_text(value)}{line}</parameter>\n" for key, value in arguments.items()
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
        return [{"name": name, "arguments": {key: typed(value, schema_of(schemas, name, key)) for key, value in pairs}}]

    return _find_calls(text, TOOL_CALL, TOOL_CALL_END, read, "<tool_call> is not followed by the name of a tool")


def write_glm(calls: Calls) -> str:
    def one(name: str, arguments: Mapping[str, Any]) -> str:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{as_text(value)}</arg_value>\n" for key, value in arguments.items()
        )
        return f"<tool_call>{name}\n{pairs}</tool_call>"

    return "\n".join(one(*call) for call in calls)


def find_invoke(text: str, schemas: Schemas, opening: str, closing: str) -> Found:
    """`<invoke name="f"><parameter name="k">v</parameter></invoke>` with any prefix of the tags (MiniMax, DeepSeek)."""

    def value_of(name: str, argument: re.Match[str]) -> Any:
        schema = schema_of(schemas, name, argument["key"])
        if argument["is_text"] is not None:
            schema = {"type": "string" if argument["is_text"] == "true" else "object"}
        return typed(_unwrap(argument["value"]), schema)

    def read(body: str) -> list[Any]:
        calls = [(call["name"], _INVOKE_ARGUMENT.finditer(call["body"])) for call in _INVOKE.finditer(body)]
        return [{"name": name, "arguments": {a["key"]: value_of(name, a) for a in found}} for name, found in calls]

    return _find_calls(text, opening, closing, read, f'{opening} holds no <invoke name="…">')


def write_invoke(calls: Calls, opening: str, closing: str, prefix: str = "") -> str:
    def argument(key: str, value: Any) -> str:
        mark = f' string="{"true" if isinstance(value, str) else "false"}"' if prefix else ""
        return f'<{prefix}parameter name="{key}"{mark}>{as_text(value)}</{prefix}parameter>\n'

    written = "".join(
        f'<{prefix}invoke name="{name}">\n{"".join(argument(*each) for each in arguments.items())}</{prefix}invoke>\n'
        for name, arguments in calls
    )
    return f"{opening}\n{written}{closing}"


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)
