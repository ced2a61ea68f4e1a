"""Tool calls written as Python: `[add(a=1, b=2), now()]`. They are read, never run."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_CALL = r"\s*[A-Za-z_][\w.]*\("
_LIST, _CODE = re.compile(rf"\[{_CALL}"), re.compile(rf"\[?{_CALL}")
_JSON_WORDS = {"true": True, "false": False, "null": None}
_LONGEST = 100_000


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A call that cannot be read, why, and its name if that much is known."""

    reason: str
    name: str = ""


def looks_like_calls(text: str, is_code: bool = False) -> bool:
    """Whether a text begins as calls do: a list of them or, where only code is expected, one alone."""
    return bool((_CODE if is_code else _LIST).match(text))


def read_calls(text: str) -> list[Any]:
    """Each call as {"name": …, "arguments": {…}}, or Unreadable.

    >>> read_calls('[add(a=1, b=[2, 3])]')
    [{'name': 'add', 'arguments': {'a': 1, 'b': [2, 3]}}]
    """
    body = _parse(text.strip()) or _parse(text.strip().replace("\n", "\\n"))  # a line break in a string, not escaped
    if body is None:
        return [Unreadable("the tool call is not valid Python")]
    found: list[Any] = []
    for statement in body:
        value = statement.value if isinstance(statement, ast.Expr) else statement
        found += [_read(node) for node in (value.elts if isinstance(value, ast.List) else [value])]
    return found


def write_call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as Python: `add(a=1, b='x')`."""

    def written(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else repr(value)

    return f"{name}({', '.join(f'{key}={written(value)}' for key, value in arguments.items())})"


def _parse(text: str) -> list[ast.stmt] | None:
    try:
        return ast.parse(text).body if len(text) <= _LONGEST else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _read(node: ast.AST) -> Any:
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and len(node.args) == 1:
        node = node.args[0]
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
        return Unreadable("the tool call is not of the form name(argument=value)")
    name = ast.unparse(node.func)
    if node.args or any(keyword.arg is None for keyword in node.keywords):
        return Unreadable("every argument needs its name: name(argument=value)", name)
    try:
        return {"name": name, "arguments": {str(k.arg): _value(k.value) for k in node.keywords}}
    except (ValueError, TypeError, RecursionError, MemoryError):
        return Unreadable("an argument is not a plain value", name)


def _value(node: ast.expr) -> Any:
    return ast.literal_eval(_AsPython().visit(node))


class _AsPython(ast.NodeTransformer):
    """true, false and null as Python spells them."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(_JSON_WORDS[node.id]) if node.id in _JSON_WORDS else node
