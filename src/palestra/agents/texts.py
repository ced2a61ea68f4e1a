"""What an agent's model reads of it: the instructions and the tools' descriptions, as texts that can be exchanged."""

from __future__ import annotations

import ast
import copy
import difflib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from palestra.agents.agent import Agent
from palestra.agents.tools.tool import Tool
from palestra.core.errors import NotFoundError, UnreadableFileError, did_you_mean

INSTRUCTIONS = "instructions"
TOOL = "tool "  # prefix of a tool's component
Texts = Mapping[str, str]  # component -> text


def texts_of(agent: Agent) -> dict[str, str]:
    """The instructions, and of each tool its description with a line `name: text` for each parameter."""
    texts = {INSTRUCTIONS: agent.fixed_instructions}
    for tool in agent.tools:
        lines = [f"{name}: {p.get('description', '')}".rstrip() for name, p in _properties(tool).items()]
        texts[f"{TOOL}{tool.name}"] = "\n".join([tool.description, *lines])
    return texts


def with_texts(agent: Agent, texts: Texts) -> Agent:
    """The same agent that says this of itself; components that are not named stay as they are."""
    known = texts_of(agent)
    for name in texts:
        if name not in known:
            raise NotFoundError(
                f"the agent {agent.name!r} has no {name!r}.{did_you_mean(name, known)} It has {', '.join(known)}"
            )
    tools = [_with_text(tool, texts.get(f"{TOOL}{tool.name}")) for tool in agent.tools]
    return replace(agent, instructions=texts.get(INSTRUCTIONS, agent.instructions), tools=tools)


def write_texts(path: Path, texts: Texts) -> None:
    path.write_text(json.dumps({"texts": dict(texts)}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_texts(path: Path) -> dict[str, str]:
    """The texts of a file that `palestra improve` wrote."""
    try:
        texts = json.loads(path.read_text(encoding="utf-8"))["texts"]
        return {str(name): str(text) for name, text in texts.items()}
    except OSError as error:
        raise UnreadableFileError(
            f"{path} cannot be read: {error.strerror}; `palestra improve` writes such a file"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UnreadableFileError(f"{path} has no texts of an agent; `palestra improve` writes such a file") from None


def texts_diff(old: Texts, new: Texts) -> str:
    """What changed, component by component."""
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


def _properties(tool: Tool) -> dict[str, Any]:
    found = tool.parameters.get("properties")
    return found if isinstance(found, dict) else {}


def read_tool_text(text: str, parameters: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """The description, and the texts of the parameters that have one.

    >>> read_tool_text("Look it up.\\nitem: Its name,\\nin singular.", {"item": {}})
    ('Look it up.', {'item': 'Its name, in singular.'})
    """
    description: list[str] = []
    found: dict[str, str] = {}
    current = None
    for line in text.strip().splitlines():
        name, colon, rest = line.strip().lstrip("-* `").partition(":")
        if colon and name.strip(" `") in parameters:
            current = name.strip(" `")
            found[current] = rest.strip()
        elif current is None:
            description.append(line.rstrip())
        else:
            found[current] = f"{found[current]} {line.strip()}".strip()
    return "\n".join(description).strip(), found


def _with_text(tool: Tool, text: str | None) -> Tool:
    if text is None:
        return tool
    description, found = read_tool_text(text, _properties(tool))
    parameters = copy.deepcopy(tool.parameters)
    for name, value in found.items():
        if value:
            parameters["properties"][name]["description"] = value
    return replace(tool, description=description or tool.description, parameters=parameters)


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
    found = [each for each in literals if each[1] == old] or [each for each in literals if old in each[1]]
    if len(found) != 1:
        return None
    node, value = found[0]
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
