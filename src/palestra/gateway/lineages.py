"""The conversations of one attempt as a tree of sampled turns: a path from a root to a leaf is a lineage.

A request whose history leads to a known turn goes on from there, with exactly the tokens that were sampled. Any other
history opens a branch: at the last turn that it shares with a known conversation, or at a root of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from palestra.chat.template import ChatFormat
from palestra.core.errors import PalestraError
from palestra.core.types import Message, ToolCall, Turn
from palestra.gateway.matching import Key, opening_key, reply_keys, request_keys
from palestra.gateway.shared_prompts import SharedPrompts
from palestra.policy.base import Policy

Schemas = Sequence[dict[str, Any]]
Place = tuple["Node | None", str, tuple[Key, ...]]  # behind which turn, with which tools, after which messages


@dataclass(eq=False, slots=True)
class Node:
    """One sampled turn with what was new before it. Its session is there until somebody goes on from it."""

    place: Place
    new_messages: tuple[Message, ...]  # since the parent; of a root the whole opening
    new_turns: tuple[Turn, ...]  # their tokens
    reply: Message
    sampled: Turn
    session: Any
    number: int  # in the order in which turns ended
    call_ids: tuple[str, ...] = ()  # of the reply's calls, as the client knows them
    tool_names: tuple[str, ...] = ()
    has_stop_token: bool = True
    refused: bool = False  # the next turn, because the lineage had used up its new tokens
    continued: bool = False

    @property
    def parent(self) -> Node | None:
        return self.place[0]

    @property
    def path(self) -> list[Node]:
        """From the root to here."""
        nodes, node = [self], self.parent
        while node is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    @property
    def token_ids(self) -> list[int]:
        return [i for node in self.path for turn in (*node.new_turns, node.sampled) for i in turn.token_ids.tolist()]

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(message for node in self.path for message in (*node.new_messages, node.reply))


@dataclass(eq=False, slots=True)
class Branch:
    """Where the next turn is sampled: an open session that holds all tokens before it."""

    place: Place
    new_messages: tuple[Message, ...]
    new_turns: tuple[Turn, ...]
    tool_names: tuple[str, ...]
    session: Any
    cached_tokens: int = 0  # of the session's, those that it held before

    @property
    def parent(self) -> Node | None:
        return self.place[0]

    @property
    def depth(self) -> int:
        """How many turns were sampled before, on the way from the root."""
        return 0 if self.parent is None else len(self.parent.path)

    @property
    def sampled_tokens(self) -> int:
        return 0 if self.parent is None else sum(len(node.sampled.token_ids) for node in self.parent.path)


@dataclass(slots=True)
class Lineages:
    """The tree of one attempt."""

    policy: Policy[Any]
    chat: ChatFormat
    prompts: SharedPrompts
    nodes: list[Node] = field(default_factory=list)
    recomputed_tokens: int = 0  # of known turns from which somebody had gone on before, and the policy cannot branch
    retokenised_turns: int = 0  # sampled, and rendered again as text because the history before them had changed
    _by_reply: dict[tuple[Place, Key], list[Node]] = field(default_factory=dict)
    _replies: set[Key] = field(default_factory=set)
    _numbers: dict[Place, set[int]] = field(default_factory=dict)

    @property
    def leaves(self) -> list[Node]:
        """The last turn of each lineage; the lineage that ended last is the last one."""
        return [node for node in self.nodes if not node.continued]

    def branch(self, messages: Sequence[Message], tools: Schemas, variables: Mapping[str, Any]) -> Branch:
        """The place that a history leads to. The caller samples there, and adds the turn or closes the session."""
        place, new_messages, new_turns = self._place(messages, tools, variables)
        session, cached = self._session(place[0], new_turns)
        if self._replies and any(message.role == "assistant" for message in new_messages):
            replies = [key for key in request_keys(new_messages) if key[0] == "assistant"]
            self.retokenised_turns += sum(key in self._replies for key in replies)
        return Branch(place, new_messages, new_turns, _names(tools), session, cached)

    def count_tokens(self, messages: Sequence[Message], tools: Schemas, variables: Mapping[str, Any]) -> int:
        """How many tokens the session of that place would hold."""
        (node, *_), _, new_turns = self._place(messages, tools, variables)
        return len(node.token_ids if node else ()) + sum(len(turn.token_ids) for turn in new_turns)

    def _place(
        self, messages: Sequence[Message], tools: Schemas, variables: Mapping[str, Any]
    ) -> tuple[Place, tuple[Message, ...], tuple[Turn, ...]]:
        """The place, the messages that are new there, and their tokens."""
        keys, opening = request_keys(messages), opening_key(tools, variables)
        node, start = self._find(messages, keys, opening)
        if node is not None:
            new_messages = tuple(_with_call_names(messages[start - 1 :], node.reply.tool_calls))[1:]
            new_turns = self._continuation(new_messages, variables, node)
            if new_turns is not None:
                return (node, opening, tuple(keys[start:])), new_messages, new_turns
        new_messages = tuple(_with_call_names(messages))
        prompt = self.prompts.render(new_messages, opening, lambda: self.chat.prompt(new_messages, tools, variables))
        return (None, opening, tuple(keys)), new_messages, (prompt,)

    def add(
        self,
        branch: Branch,
        reply: Message,
        sampled: Turn,
        session: Any,
        call_ids: tuple[str, ...],
        has_stop_token: bool,
    ) -> Node:
        """Record a sampled turn."""
        node = Node(
            branch.place,
            branch.new_messages,
            branch.new_turns,
            reply,
            sampled,
            session,
            len(self.nodes),
            call_ids,
            branch.tool_names,
            has_stop_token,
        )
        self.nodes.append(node)
        if branch.parent is not None:
            branch.parent.continued = True
        keys = reply_keys(reply)
        self._replies.add(keys[0])
        for key in keys:
            self._by_reply.setdefault((branch.place, key), []).append(node)
        return node

    def take_number(self, place: Place) -> int:
        """The lowest free number of a turn at this place. It decides the seed."""
        taken = self._numbers.setdefault(place, set())
        number = next(i for i in range(len(taken) + 1) if i not in taken)
        taken.add(number)
        return number

    def free_number(self, place: Place, number: int) -> None:
        """That turn was not sampled: the same request gets the same answer again."""
        self._numbers[place].discard(number)

    def close(self) -> None:
        for node in self.nodes:
            if node.session is not None:
                self.prompts.close_session(node.session)
                node.session = None

    def rows(self) -> Iterator[tuple[Node, tuple[Turn, ...]]]:
        """Each lineage's leaf and turns. A sampled turn is trained in one row alone: in others it is context."""
        trained: set[Node] = set()
        for leaf in self.leaves:
            turns: list[Turn] = []
            for node in leaf.path:
                sampled = Turn("template", node.sampled.token_ids) if node in trained else node.sampled
                turns += (*node.new_turns, sampled)
                trained.add(node)
            yield leaf, tuple(turns)

    def _find(self, messages: Sequence[Message], keys: list[Key], opening: str) -> tuple[Node | None, int]:
        """The known turn with the longest history that this one begins with, and where the rest begins.

        Of several such turns (parallel ones may say the same) the one with these ids of tool calls, then one from
        which nobody has gone on, then the first.
        """
        ends = [i for i, message in enumerate(messages) if message.role == "assistant"]
        ids = {call.id for message in messages for call in message.tool_calls}
        best: tuple[tuple[int, ...], Node | None, int] = ((0,), None, 0)
        paths: list[tuple[Node | None, int, int]] = [(None, 0, 0)]
        while paths:
            node, start, known_ids = paths.pop()
            for end in (i for i in ends if i >= start):
                place = (node, opening, tuple(keys[start:end]))
                for child in self._by_reply.get((place, keys[end]), ()):
                    known = known_ids + sum(call_id in ids for call_id in child.call_ids)
                    rank = (end + 1, known, not child.continued, -child.number)
                    if rank > best[0]:
                        best = rank, child, end + 1
                    paths.append((child, end + 1, known))
        return best[1], best[2]

    def _continuation(
        self, new_messages: Sequence[Message], variables: Mapping[str, Any], node: Node
    ) -> tuple[Turn, ...] | None:
        """None where the template cannot append these messages: then the whole history is rendered anew."""
        try:
            last = int(node.sampled.token_ids[-1]) if node.has_stop_token else None
            return self.chat.continuation(
                new_messages, variables, after_stop_token=node.has_stop_token, last_token=last
            )
        except PalestraError:
            return None

    def _session(self, node: Node | None, new_turns: Sequence[Turn]) -> tuple[Any, int]:
        """A session that holds all tokens up to here, and how many of them it held before."""
        new = [i for turn in new_turns for i in turn.token_ids.tolist()]
        if node is None:
            return self.prompts.open(new)
        if node.session is None:
            known = node.token_ids
            session, cached = self.prompts.branch(known + new)
            self.recomputed_tokens += max(0, len(known) - cached)
            return session, cached
        session, node.session = node.session, None
        cached = len(session.token_ids)
        self.policy.append(session, new)
        return session, cached


def _with_call_names(messages: Sequence[Message], calls: Sequence[ToolCall] | None = None) -> Iterator[Message]:
    """Tool results with the names of their calls, which some templates show. `calls` stand for those of the first
    message: its ids are the client's, theirs the model's own."""
    by_id: dict[str | None, ToolCall] = {}
    for i, message in enumerate(messages):
        if message.role == "assistant":
            own = message.tool_calls if calls is None or i else calls
            by_id = dict(zip((call.id for call in message.tool_calls), own, strict=False))
        call = by_id.get(message.tool_call_id) if message.role == "tool" else None
        yield message if call is None else replace(message, tool_call_id=call.id, name=call.name)


def _names(tools: Schemas) -> tuple[str, ...]:
    return tuple(str(tool.get("function", tool).get("name", "")) for tool in tools)
