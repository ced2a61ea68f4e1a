"""As much of Go's text/template as Ollama's templates use, to see what they write without an Ollama."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_TAG = re.compile(r"\{\{(-\s)?\s*(.*?)\s*(\s-)?\}\}", re.DOTALL)
_WORD = re.compile(r'"(?:\\.|[^"\\])*"|\(|\)|:=|=|,|[^\s()",=:]+')


def render(template: str, values: Mapping[str, Any]) -> str:
    """What Go would write; maps are walked in the order of their keys, as Go does."""
    nodes, unclosed, _ = _parse(_split(template), 0)
    assert not unclosed
    out: list[str] = []
    _run(nodes, values, {"$": values}, out)
    return "".join(out)


def _split(template: str) -> list[tuple[str, str]]:
    parts: list[tuple[str, str]] = []
    at, trim_next = 0, False
    for tag in _TAG.finditer(template):
        text = template[at : tag.start()]
        text = text.lstrip() if trim_next else text
        parts += [("text", text.rstrip() if tag[1] else text), ("tag", tag[2])]
        at, trim_next = tag.end(), bool(tag[3])
    text = template[at:]
    return [*parts, ("text", text.lstrip() if trim_next else text)]


def _parse(parts: Sequence[tuple[str, str]], at: int) -> tuple[list[Any], str, int]:
    """Nodes up to the `else` or `end` that belongs to the caller, that tag, and where to go on."""
    nodes: list[Any] = []
    while at < len(parts):
        kind, text = parts[at]
        at += 1
        word, _, rest = text.partition(" ")
        if kind == "text":
            nodes.append(("text", text))
        elif word in ("if", "range"):
            node, at = _parse_block(word, rest, parts, at)
            nodes.append(node)
        elif word in ("else", "end"):
            return nodes, text, at
        else:
            nodes.append(("do", text))
    return nodes, "", at


def _parse_block(word: str, head: str, parts: Sequence[tuple[str, str]], at: int) -> tuple[Any, int]:
    body, tag, at = _parse(parts, at)
    other: list[Any] = []
    if tag.startswith("else if "):
        node, at = _parse_block("if", tag.removeprefix("else if "), parts, at)
        other = [node]
    elif tag == "else":
        other, tag, at = _parse(parts, at)
    return (word, head, body, other), at


def _run(nodes: Sequence[Any], dot: Any, names: dict[str, Any], out: list[str]) -> None:
    for node in nodes:
        match node:
            case ("text", text):
                out.append(text)
            case ("do", text):
                if match := re.match(r"(\$\w+)\s*:?=\s*(.*)", text, re.DOTALL):
                    names[match[1]] = _value(match[2], dot, names)
                else:
                    out.append(_shown(_value(text, dot, names)))
            case ("if", text, body, other):
                _run(body if _value(text, dot, names) else other, dot, names, out)
            case ("range", text, body, _):
                match = re.match(r"(\$\w+),\s*(\$\w+)\s*:=\s*(.*)", text, re.DOTALL)
                items = _value(match[3] if match else text, dot, names) or []
                pairs = sorted(items.items()) if isinstance(items, Mapping) else list(enumerate(items))
                for key, item in pairs:
                    if match:
                        names[match[1]], names[match[2]] = key, item
                    _run(body, item, names, out)


def _value(text: str, dot: Any, names: Mapping[str, Any]) -> Any:
    return _call(_WORD.findall(text), dot, names)


def _call(words: list[str], dot: Any, names: Mapping[str, Any]) -> Any:
    terms: list[Any] = []
    head = words[0] if words[0] in ("and", "or", "not", "eq", "ne", "json") else None
    rest = words[1:] if head else words[:]
    while rest:
        word = rest.pop(0)
        if word == "(":
            depth, inner = 1, []
            while depth:
                inner.append(rest.pop(0))
                depth += {"(": 1, ")": -1}.get(inner[-1], 0)
            terms.append(_call(inner[:-1], dot, names))
        else:
            terms.append(_term(word, dot, names))
    match head:
        case "and":
            return next((term for term in terms if not term), terms[-1])
        case "or":
            return next((term for term in terms if term), terms[-1])
        case "not":
            return not terms[0]
        case "eq":
            return terms[0] == terms[1]
        case "ne":
            return terms[0] != terms[1]
        case "json":
            return json.dumps(terms[0], separators=(",", ":"), ensure_ascii=False)
    assert len(terms) == 1, words
    return terms[0]


def _term(word: str, dot: Any, names: Mapping[str, Any]) -> Any:
    if word.startswith('"'):
        return json.loads(word)
    if word in ("true", "false"):
        return word == "true"
    start, *path = word.split(".")
    value = dot if start == "" else names[start]
    for name in path:
        if name:
            value = value.get(name)
    return value


def _shown(value: Any) -> str:
    """As Ollama shows it: tools and arguments are JSON."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)
