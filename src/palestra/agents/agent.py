"""An agent: a model, its instructions and its tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from palestra.agents.tools.mcp_client import as_mcp_server
from palestra.agents.tools.tool import as_tool, tools_by_name
from palestra.core.errors import PalestraError


@dataclass
class Agent:
    """What is to be trained. Tools may be `@function_tool`s or plain typed functions with docstrings; MCP servers, as
    commands or `McpServer`s, add theirs.

    >>> agent = Agent("clerk", "palestra/tiny", "You answer with the tools.", tools=[])
    """

    name: str
    model: str | None = None
    instructions: str | Callable[..., Any] = ""
    tools: Sequence[Any] = ()
    mcp_servers: Sequence[Any] = ()

    def __post_init__(self) -> None:
        enabled = (
            tool for tool in self.tools or () if getattr(tool, "is_enabled", True) is not False
        )  # of openai-agents
        self.tools = tuple(as_tool(tool) for tool in enabled)
        tools_by_name(self.tools)  # refuses two of one name
        self.mcp_servers = tuple(as_mcp_server(server) for server in self.mcp_servers or ())

    @property
    def fixed_instructions(self) -> str:
        """The instructions as text; training needs the same ones for every rollout."""
        if callable(self.instructions):
            raise PalestraError(
                f"the instructions of agent {self.name!r} are a function, so they may differ from call to call; "
                f"training needs fixed ones. Pass a string, Agent({self.name!r}, instructions='You are …'), and write "
                "what differs from case to case into the case's input."
            )
        return self.instructions or ""

    @property
    def required_model(self) -> str:
        """The model's name; training cannot do without."""
        if not self.model:
            raise PalestraError(
                f"agent {self.name!r} has no model. Name one: Agent({self.name!r}, model='palestra/tiny'), "
                "a hub id such as 'Qwen/Qwen3-0.6B', or a local folder."
            )
        return self.model
