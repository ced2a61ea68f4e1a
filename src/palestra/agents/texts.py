"""The instructions and tool descriptions of an agent, as texts that can be exchanged."""

from __future__ import annotations

import copy
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
    tools = []
    for tool in agent.tools:
        if (text := texts.get(f"{TOOL}{tool.name}")) is not None:
            parameters = copy.deepcopy(tool.parameters)
            description, about = read_tool_text(text, _properties(tool))
            for name, value in about.items():
                if value:
                    parameters["properties"][name]["description"] = value
            tool = replace(tool, description=description or tool.description, parameters=parameters)
        tools.append(tool)
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


def _properties(tool: Tool) -> dict[str, Any]:
    properties = tool.parameters.get("properties")
    return properties if isinstance(properties, dict) else {}


def read_tool_text(text: str, parameters: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """The description, and the texts of the parameters that have one.

    >>> read_tool_text("Look it up.\\nitem: Its name,\\nin singular.", {"item": {}})
    ('Look it up.', {'item': 'Its name, in singular.'})
    """
    description: list[str] = []
    texts: dict[str, str] = {}
    current = None
    for line in text.strip().splitlines():
        name, colon, rest = line.strip().lstrip("-* `").partition(":")
        if colon and name.strip(" `") in parameters:
            current = name.strip(" `")
            texts[current] = rest.strip()
        elif current is None:
            description.append(line.rstrip())
        else:
            texts[current] = f"{texts[current]} {line.strip()}".strip()
    return "\n".join(description).strip(), texts
