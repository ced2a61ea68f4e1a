"""An agent: a model, its instructions and its tools."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from palestra.agents.tools.mcp_client import as_mcp_server
from palestra.agents.tools.tool import as_tool, tools_by_name
from palestra.core.errors import InputError, PalestraError, did_you_mean, refuse_arguments

if TYPE_CHECKING:
    from palestra.core.conversations import Conversation


@dataclass
class Agent:
    """An agent to train. Tools may be `@function_tool`s or plain typed functions with docstrings; MCP servers, as
    commands or `McpServer`s, add theirs. Examples show how the agent solves a case: lists of messages, or the path of a
    file of them. Supervised stages train on them; they are not part of any prompt.

    >>> agent = Agent("clerk", "palestra/tiny", "You answer with the tools.", tools=[])
    """

    name: str
    model: str | None = None
    instructions: str | Callable[..., Any] | None = ""  # none: no system message
    tools: Sequence[Any] = ()
    mcp_servers: Sequence[Any] = ()
    examples: Any = ()  # conversations, or the path of a file of them
    has_own_tools: ClassVar[bool] = False  # tools that are not in `tools`

    def __new__(cls, *arguments: Any, **named: Any) -> Self:
        refuse_arguments("Agent", named, [field.name for field in fields(cls) if field.init], {})
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("tools", "mcp_servers"):
            if not isinstance(value := getattr(self, name) or (), Iterable) or isinstance(value, str):
                raise InputError(
                    f"{name} of agent {self.name!r} is a {type(value).__name__}; expected a list, such as {name}=[…]"
                )
        enabled = (tool for tool in self.tools or () if getattr(tool, "is_enabled", True) is not False)  # in the SDK
        self.tools = tuple(as_tool(tool) for tool in enabled)
        tools_by_name(self.tools)  # refuses two of one name
        self.mcp_servers = tuple(as_mcp_server(server) for server in self.mcp_servers or ())
        if self.examples:
            self.examples = tuple(_read_examples(self.examples, self.name))
            known = None if self.has_own_tools or self.mcp_servers else [tool.name for tool in self.tools]
            for example in self.examples:
                called = [call.name for message in example.messages for call in message.tool_calls]
                if known is not None and (unknown := [name for name in called if name not in known]):
                    has = f"it has {', '.join(known)}" if known else "it has no tools"
                    raise InputError(
                        f"{example.origin} calls {unknown[0]!r}, which is no tool of agent {self.name!r}; {has}."
                        f"{did_you_mean(unknown[0], known)}"
                    )

    @property
    def fixed_instructions(self) -> str:
        """The instructions as text; training needs the same ones for every rollout."""
        if callable(self.instructions):
            raise InputError(
                f"the instructions of agent {self.name!r} are a function, so they may differ from call to call; "
                f"training needs fixed ones. Pass a string, Agent({self.name!r}, instructions='You are …'), and write "
                "what differs from case to case into the case's input."
            )
        return self.instructions or ""

    @property
    def required_model(self) -> str:
        """The model's name; training cannot do without."""
        if not self.model:
            raise InputError(
                f"agent {self.name!r} has no model. Name one: Agent({self.name!r}, model='palestra/tiny'), "
                "a hub id such as 'Qwen/Qwen3-0.6B', or a local folder."
            )
        return self.model


def agent_examples(agent: Agent) -> list[Conversation]:
    """The agent's examples with its instructions in front, where they have no system message, and with its tools."""
    examples: list[Conversation] = list(agent.examples)
    if not all(any(m.role == "system" for m in example.messages) for example in examples):
        examples = [example.with_system(agent.fixed_instructions) for example in examples]
    schemas = tuple(tool.schema for tool in agent.tools)
    return [replace(example, tools=schemas) if schemas else example for example in examples]


def _read_examples(examples: Any, name: str) -> Iterator[Conversation]:
    from palestra.core.conversations import Conversation, conversation_from, conversation_of, read_conversations

    for i, example in enumerate([examples] if isinstance(examples, str | Path) else examples):
        origin = f"example {i} of agent {name!r}"
        if isinstance(example, Conversation):
            yield example
        elif isinstance(example, str | Path):
            yield from read_conversations(Path(example))
        else:
            try:
                is_record = isinstance(example, Mapping)
                read = conversation_from(dict(example), origin) if is_record else conversation_of(example, (), origin)
            except (PalestraError, ValueError, KeyError, TypeError, AttributeError) as error:
                raise InputError(
                    f"{origin}: {str(error).rstrip('.')}. Give a list of messages, "
                    "[{'role': 'user', 'content': …}, {'role': 'assistant', 'content': …}], or the path of a file"
                ) from None
            yield read
