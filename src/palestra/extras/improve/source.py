"""New texts of an agent as a diff, and written into the literals of its file."""

from __future__ import annotations

import ast
import difflib
import json

from palestra.agents.texts import INSTRUCTIONS, Texts, read_tool_text


def texts_diff(old: Texts, new: Texts) -> str:
    """The changes, component by component."""
    parts: list[str] = []
    for name in new:
        before, after = (text.get(name, "").splitlines() for text in (old, new))
        parts += difflib.unified_diff(before, after, f"before: {name}", f"after: {name}", lineterm="")
    return "\n".join(parts) + ("\n" if parts else "")


def edit_source(source: str, old: Texts, new: Texts) -> tuple[str, list[str]]:
    """An agent file with the new texts in its literals, and the components that could not be placed.

    A literal is replaced where its value is the old text, or contains it, and no other literal does.
    """
    missing = []
    for name, text in new.items():
        for before, after in _replacements(name, old.get(name, ""), text):
            edited = _replace_literal(source, before, after) if before else None
            if edited is None:
                missing.append(name)
            else:
                source = edited
    return source, list(dict.fromkeys(missing))


def source_diff(before: str, after: str, name: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), f"a/{name}", f"b/{name}", lineterm="")
    return "\n".join(lines) + "\n"


def _replacements(name: str, old: str, new: str) -> list[tuple[str, str]]:
    if old == new:
        return []
    if name == INSTRUCTIONS:
        return [(old, new)]
    olds, news = old.splitlines(), new.splitlines()
    names = {line.partition(":")[0] for line in olds if ":" in line}
    (before, parts), (after, new_parts) = (read_tool_text("\n".join(t), dict.fromkeys(names)) for t in (olds, news))
    changed = [(parts.get(key, ""), text) for key, text in new_parts.items() if text and text != parts.get(key)]
    return [(before, after)] * (before != after) + changed


def _replace_literal(source: str, old: str, new: str) -> str | None:
    """The source with `new` for `old` in the one literal that has it; None where there is none, or several."""
    tree = ast.parse(source)
    in_formatted = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    literals = [
        (node, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in in_formatted
    ]
    matches = [each for each in literals if each[1] == old] or [each for each in literals if old in each[1]]
    if len(matches) != 1:
        return None
    node, value = matches[0]
    raw = source.encode()  # columns count bytes
    lines = raw.splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: (node.end_lineno or 0) - 1])) + (node.end_col_offset or 0)
    literal = _literal(value.replace(old, new, 1), triple=raw[start:end].endswith(b'"""'))
    return (raw[:start] + literal.encode() + raw[end:]).decode()


def _literal(value: str, triple: bool) -> str:
    if "\n" not in value and not triple:
        return json.dumps(value, ensure_ascii=False)
    literal = '"""' + value.replace("\\", "\\\\") + '"""'
    try:
        if ast.literal_eval(literal) == value:
            return literal
    except SyntaxError:
        pass
    return json.dumps(value, ensure_ascii=False)  # it has quotes of its own
