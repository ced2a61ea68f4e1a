"""Docstrings of Google, NumPy and Sphinx style -> a description and one text per parameter."""

from __future__ import annotations

import inspect
import re

_GOOGLE_SECTION = re.compile(
    r"^(Args|Arguments|Parameters|Params|Returns?|Yields?|Raises|Examples?|Notes?|Attributes|Warnings?|See Also):\s*$"
)
_NUMPY_RULE = re.compile(r"^-{3,}\s*$")
_SPHINX_FIELD = re.compile(r"^:(?P<tag>[a-zA-Z]+)(?:\s+(?P<words>[^:]*))?:\s*(?P<text>.*)$")
_GOOGLE_ITEM = re.compile(r"^\*{0,2}(?P<name>\w+)\s*(?:\(.*?\))?\s*:\s*(?P<text>.*)$")
_NUMPY_ITEM = re.compile(r"^\*{0,2}(?P<names>\w+(?:\s*,\s*\w+)*)\s*(?::.*)?$")


def parse_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """What the function does, and what each parameter means.

    >>> parse_docstring("Add.\\n\\nArgs:\\n    a: The first number.")
    ('Add.', {'a': 'The first number.'})
    """
    lines = inspect.cleandoc(docstring).splitlines()
    start = next((i for i in range(len(lines)) if _is_section(lines, i)), len(lines))
    description = "\n".join(lines[:start]).strip()
    parameters: dict[str, str] = {}
    for i in range(start, len(lines)):
        if lines[i].rstrip(": ") not in ("Args", "Arguments", "Parameters", "Params"):
            continue
        numpy = i + 1 < len(lines) and bool(_NUMPY_RULE.match(lines[i + 1]))
        if numpy or _GOOGLE_SECTION.match(lines[i]):
            first = i + 2 if numpy else i + 1
            end = next((j for j in range(first, len(lines)) if _is_section(lines, j)), len(lines))
            body = inspect.cleandoc("\n" + "\n".join(lines[first:end])).splitlines()
            parameters |= _items(body, numpy)
    return description, parameters | _sphinx(lines[start:])


def _is_section(lines: list[str], i: int) -> bool:
    underlined = i + 1 < len(lines) and bool(lines[i].strip()) and bool(_NUMPY_RULE.match(lines[i + 1]))
    return underlined or bool(_GOOGLE_SECTION.match(lines[i]) or _SPHINX_FIELD.match(lines[i]))


def _items(body: list[str], numpy: bool) -> dict[str, str]:
    """The entries of one parameter section: heads at the margin, further text indented."""
    texts: dict[str, list[str]] = {}
    names: list[str] = []
    for line in body:
        at_margin = line[:1].strip() != ""
        match = (_NUMPY_ITEM if numpy else _GOOGLE_ITEM).match(line) if at_margin else None
        if match and numpy:
            names = [name.strip() for name in match["names"].split(",")]
            texts |= {name: [] for name in names}
        elif match:
            names = [match["name"]]
            texts[match["name"]] = [match["text"]]
        else:
            for name in names:
                texts[name].append(line.strip())
    return {name: " ".join(part for part in parts if part) for name, parts in texts.items()}


def _sphinx(lines: list[str]) -> dict[str, str]:
    texts: dict[str, list[str]] = {}
    name: str | None = None
    for line in lines:
        match = _SPHINX_FIELD.match(line)
        if match:
            is_parameter = match["tag"] in ("param", "parameter", "arg", "argument", "key") and match["words"]
            name = (
                match["words"].split()[-1].lstrip("*") if is_parameter else None
            )  # ":param int x:" has its type first
            if name:
                texts[name] = [match["text"]]
        elif name:
            texts[name].append(line.strip())
    return {name: " ".join(part for part in parts if part) for name, parts in texts.items()}
