"""The ten `rl_*` tools with which an agent starts, watches and compares trainings.

The names below are the tools as Python functions, over one session for this program; `RlTools()` is a separate session.
`mcp_server` serves the same tools over MCP and HTTP. `launcher` starts runs for the dashboard with the same checks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from palestra.extras.agent_tools.answers import Answer
from palestra.extras.agent_tools.clients import RlTools, tool_function
from palestra.extras.agent_tools.tools import TOOLS, check_rl_api_keys, check_rl_python_version, get_missing_keys

TOOL_NAMES = tuple(TOOLS)
__all__ = [
    "TOOL_NAMES",
    "RlTools",
    "check_rl_api_keys",
    "check_rl_python_version",
    "get_missing_keys",
    "tool_schemas",
    *TOOL_NAMES,
]


@cache
def this_session() -> RlTools:
    """The session of this program's functions."""
    return RlTools()


@cache
def __getattr__(name: str) -> Callable[..., Answer]:
    """The tool of this name as a function of this program's session."""
    return tool_function(name, this_session)


def tool_schemas() -> list[dict[str, Any]]:
    """The schemas of the ten tools, in the form of OpenAI's function calling."""
    return [tool.schema for tool in TOOLS.values()]
