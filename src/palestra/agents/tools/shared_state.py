"""Tools that change what all attempts share: a variable of their module or closure, or the object they belong to."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import deque
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

_CHANGES = set(
    "append appendleft extend insert pop popitem popleft remove discard clear add update setdefault sort".split()
)


def shared_state(fn: Callable[..., Any]) -> list[str]:
    """The names of the variables outside of `fn` that it changes, as far as its own source shows it.

    >>> stock = {"lamp": 3}
    >>> def take(item):
    ...     stock[item] -= 1
    >>> shared_state(take)      # doctest: +SKIP
    ['stock']
    """
    try:
        outer = _outer_variables(fn)
        tree = ast.parse(textwrap.dedent(inspect.getsource(fn))).body[0]
    except (OSError, TypeError, AttributeError, SyntaxError, IndexError):
        return []  # no source, or no function of Python
    return list(dict.fromkeys(name for node in ast.walk(tree) for name in _changed(node, outer)))


def _outer_variables(fn: Callable[..., Any]) -> dict[str, Any]:
    code, values = fn.__code__, {}
    if inspect.ismethod(fn):
        values[code.co_varnames[0]] = fn.__self__
    cells = zip(code.co_freevars, getattr(fn, "__closure__", None) or (), strict=False)
    values |= {name: cell.cell_contents for name, cell in cells}
    values |= {name: fn.__globals__[name] for name in code.co_names if name in fn.__globals__}
    return {name: value for name, value in values.items() if not isinstance(value, ModuleType)}


def _changed(node: ast.AST, outer: dict[str, Any]) -> Iterator[str]:
    match node:
        case ast.Global(names=names):  # it is needed to assign, not to read
            yield from names
        case ast.Nonlocal(names=names):
            yield from (name for name in names if name in outer)
        case ast.Subscript(ctx=ast.Store() | ast.Del()) | ast.Attribute(ctx=ast.Store() | ast.Del()):
            if (name := _root(node)) in outer:
                yield name
        case ast.Call(func=ast.Attribute(attr=attr, value=value)) if attr in _CHANGES:
            if isinstance(_value(value, outer), list | dict | set | bytearray | deque):
                yield _root(value)


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _value(node: ast.AST, outer: dict[str, Any]) -> Any:
    """What an expression stands for, without running any code: `stock`, `self.items`, or an entry of such a thing."""
    match node:
        case ast.Name(id=name):
            return outer.get(name)
        case ast.Attribute(value=owner, attr=attr):
            return getattr(_value(owner, outer), "__dict__", {}).get(attr)
        case ast.Subscript(value=owner):
            return _value(owner, outer)  # an entry of a shared container may well be one, too
    return None
