"""The Environment seam: hand out problems, give tools, react to a turn, score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from palestra.core.types import Message, Problem, Score, ToolResult

if TYPE_CHECKING:
    from palestra.agents.tools.tool import Tool

Split = Literal["train", "held_out"]


class Episode(Protocol):
    """One attempt at one problem: its opening messages and tools, its replies and its score."""

    @property
    def prompt(self) -> Sequence[Message]: ...

    @property
    def tools(self) -> Sequence[Tool]: ...

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The replies to an assistant message without tool calls; none ends the attempt."""
        ...

    async def score(self, messages: Sequence[Message], tool_results: Sequence[ToolResult]) -> Mapping[str, Score]: ...

    def close(self) -> None: ...


class Environment(Protocol):
    """A source of problems. Suites and environments of other libraries adapt to this."""

    def problems(self, split: Split) -> Sequence[Problem]: ...

    def open(self, problem: Problem) -> Episode: ...

    @property
    def reward_weights(self) -> Mapping[str, float]:
        """The weight of each measure in the reward."""
        ...
