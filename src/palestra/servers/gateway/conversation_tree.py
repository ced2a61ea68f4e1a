"""The conversations of one attempt as a tree of sampled turns: a path from a root to a leaf is one lineage.

A request whose history leads to a known turn continues there, with exactly the tokens that were sampled. Any other
history starts a branch: at the last turn that it shares with a known conversation, or at a new root. Prompts that
several attempts or lineages share are rendered and computed once.
"""

from __future__ import annotations

import asyncio
import marshal
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from palestra.core.errors import PalestraError
from palestra.core.types import Message, SamplingParams, ToolCall, Turn
from palestra.policy.base import Policy
from palestra.servers.gateway.request import Key, PromptSize, marshalled_key, reply_keys, request_keys
from palestra.servers.openai.completer import MAX_INLINE_CHARS, Completer, texts_of

_WORTH_SHARING = 16  # tokens; the first few of a template are the same in every conversation
_KEY_COST = 8  # comparing a character is about this many times faster than tokenising it
_MAX_UNUSED = 64  # turns that later requests are searched for
Schemas = Sequence[dict[str, Any]]
Place = tuple["TurnNode | None", str, tuple[Key, ...]]  # parent turn, key of the tools, keys of the new messages


@dataclass(eq=False, slots=True)
class SharedPrompts:
    """The sessions of a group of siblings. Close it when they have ended.

    The first that opens a prompt forks it for all. Any other beginning goes on from the open session with which it has
    the most tokens in common, where the policy can branch: an edited history, a subagent with the same instructions.
    With 0 siblings nothing is shared here: the engine finds the prefixes of a server's closed sessions itself.
    """

    policy: Policy[Any]
    siblings: int
    _forks: dict[tuple[int, ...], list[Any]] = field(default_factory=dict)
    _open: dict[int, Any] = field(default_factory=dict)  # handed out and not closed yet, by their id()
    _rendered: dict[Any, Turn] = field(default_factory=dict)

    def render(self, messages: Sequence[Message], opening: str, make: Callable[[], Turn]) -> Turn:
        """The tokens of an opening; `opening` names its tools and variables."""
        if self.siblings <= 1 or any(message.tool_calls for message in messages):
            return make()
        key = (opening, tuple(messages))
        if key not in self._rendered:
            self._rendered[key] = make()
        return self._rendered[key]

    def open(self, prompt_ids: Sequence[int]) -> tuple[Any, int]:
        """A session with a prompt that siblings may open, too, and how many of its tokens another one had."""
        key = tuple(prompt_ids)
        if forks := self._forks.get(key):
            return self._noted(forks.pop()), 0
        session, shared = self.branch(prompt_ids)
        if self.siblings > 1 and not shared and key not in self._forks:  # else forking would be one step more
            self._open.pop(id(session), None)
            session, *self._forks[key] = self.policy.fork(session, self.siblings)
            self._noted(session)
        return session, shared

    def branch(self, token_ids: Sequence[int]) -> tuple[Any, int]:
        """A session with these tokens, and how many of them it shares with another one."""
        source, shared = None, _WORTH_SHARING - 1
        for session in reversed(self._open.values()):
            if session.token_ids[shared : shared + 1] != token_ids[shared : shared + 1]:
                continue  # it cannot share more
            if (length := _in_common(token_ids, session.token_ids)) > shared:
                source, shared = session, length
        if source is None:
            return self._noted(self.policy.open(token_ids)), 0
        session = self.policy.branch(source, shared)
        self.policy.append(session, token_ids[shared:])
        return self._noted(session), shared

    def fork(self, session: Any, n: int) -> list[Any]:
        """Replace a session by n copies."""
        self._open.pop(id(session), None)
        return [self._noted(each) for each in self.policy.fork(session, n)]

    def close_session(self, session: Any) -> None:
        self._open.pop(id(session), None)
        self.policy.close(session)

    def close(self) -> None:
        for forks in self._forks.values():
            for session in forks:
                self.policy.close(session)
        self._forks.clear()

    def _noted(self, session: Any) -> Any:
        if self.siblings and self.policy.can_branch:
            self._open[id(session)] = session
        return session


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Prompt:
    """A place in the tree, the messages that are new there, and their tokens."""

    place: Place
    new_messages: tuple[Message, ...]  # since the parent; for a root the whole history
    new_turns: tuple[Turn, ...]
    new_ids: list[int]  # the tokens of the new turns
    tool_names: tuple[str, ...]

    @property
    def parent(self) -> TurnNode | None:
        return self.place[0]

    @property
    def token_count(self) -> int:
        """Number of tokens before the next turn."""
        return (0 if self.parent is None else self.parent.token_count) + len(self.new_ids)

    @property
    def path(self) -> list[TurnNode]:
        return [] if self.parent is None else self.parent.path


@dataclass(eq=False, slots=True, repr=False)
class TurnNode:
    """One turn behind a prompt. `ConversationTree.add` takes it in when it has been sampled.

    From then on its session stays open until a request continues it.
    """

    prompt: Prompt
    session: Any
    params: SamplingParams
    size: PromptSize  # of what was in the session before
    place_number: int  # among the turns at the same place
    task: asyncio.Task[Turn] | None = None  # that samples it, where it has one of its own
    reply: Message = field(init=False)
    sampled: Turn = field(init=False)
    number: int = -1  # in the order in which turns ended; -1 outside of the tree
    call_ids: tuple[str, ...] = ()  # of the reply's calls, as the client knows them
    has_stop_token: bool = True
    refused: bool = False  # the next turn was refused because the lineage had used up its new tokens
    continued: bool = False
    used: bool = False  # a later request contains it: the agent has read it and built on it

    @property
    def is_cut_off(self) -> bool:
        """Whether the lineage ended in the middle of a turn, or was refused the next one."""
        return self.refused or self.sampled.finish != "stop"

    @property
    def path(self) -> list[TurnNode]:
        """The turns from the root to this one."""
        nodes, node = [self], self.prompt.parent
        while node is not None:
            nodes.append(node)
            node = node.prompt.parent
        return nodes[::-1]

    @property
    def token_ids(self) -> list[int]:
        return _ids([turn for node in self.path for turn in (*node.prompt.new_turns, node.sampled)])

    @property
    def token_count(self) -> int:
        return sum(len(node.prompt.new_ids) + len(node.sampled.token_ids) for node in self.path)

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(message for node in self.path for message in (*node.prompt.new_messages, node.reply))


@dataclass(slots=True)
class ConversationTree:
    """All turns of one attempt."""

    model: Completer
    prompts: SharedPrompts
    nodes: list[TurnNode] = field(default_factory=list)
    recomputed_tokens: int = 0  # of turns that were continued before, where the policy cannot branch
    retokenised_turns: int = 0  # sampled turns that were rendered as text again because the history had changed
    _by_reply: dict[tuple[Place, Key], list[TurnNode]] = field(default_factory=dict)
    _lengths: dict[tuple[TurnNode | None, str], dict[int, None]] = field(default_factory=dict)  # of places' keys
    _unused: dict[TurnNode, None] = field(default_factory=dict)  # the last turns that no request has contained yet
    _replies: set[Key] = field(default_factory=set)
    _numbers: dict[Place, set[int]] = field(default_factory=dict)

    @property
    def leaves(self) -> list[TurnNode]:
        """The last turn of each lineage, in the order in which the turns ended."""
        return [node for node in self.nodes if not node.continued]

    async def place(self, messages: Sequence[Message], tools: Schemas, variables: Mapping[str, Any]) -> Prompt:
        """Find the place that a history leads to, and tokenise the messages that are new there.

        PalestraError if the history cannot fit the context.
        """
        tools_size = len(marshal.dumps(list(tools), 2)) if tools else 0
        if tools_size > self.model.max_characters:
            self.model.check_length(sum(map(len, texts_of(tools))))
        # old thinking may be left out of a prompt, so an assistant's text that has some does not count
        shown = (len(m.text) for m in messages if m.role != "assistant" or "think>" not in m.text)
        self.model.check_length(sum(shown))
        size = tools_size + _characters(messages)
        keys, opening = await self.model.prepare(
            # tools and variables are the same in most requests, and marshalled ten times as quickly as written in JSON
            size // _KEY_COST,
            lambda _: (request_keys(messages), marshalled_key(marshal.dumps([tools, variables], 2))),
        )
        node, start = self._find(messages, keys, opening)
        names = tuple(str(tool.get("function", tool).get("name", "")) for tool in tools)
        if node is not None:
            new_messages = tuple(_with_call_names(messages[start - 1 :], node.reply.tool_calls))[1:]
            turns = await self.model.prepare(
                _characters(new_messages), lambda model: _with_ids(_continuation(model, new_messages, variables, node))
            )
            if turns is not None:
                return Prompt((node, opening, tuple(keys[start:])), new_messages, turns[0], turns[1], names)
        whole = tuple(_with_call_names(messages))

        def tokenise(model: Completer) -> Turn:
            if model is not self.model:  # in a thread: the text may be far too long
                model.check_tokens([*(m.text for m in whole), *texts_of(tools)])
            return model.chat.prompt(whole, tools, variables)

        new_turns, new_ids = await self.model.prepare(
            size, lambda model: _with_ids((self.prompts.render(whole, opening, lambda: tokenise(model)),))
        )
        return Prompt((None, opening, tuple(keys)), whole, new_turns, new_ids, names)

    def open(self, prompt: Prompt) -> tuple[Any, int]:
        """Open a session that holds all tokens of a prompt; also return how many of them were computed before.

        The caller samples there, and adds the turn or closes the session.
        """
        node, new_ids = prompt.parent, prompt.new_ids
        if node is None:
            session, cached = self.prompts.open(new_ids)
        elif node.session is None:
            known = node.token_ids
            session, cached = self.prompts.branch(known + new_ids)
            self.recomputed_tokens += max(0, len(known) - cached)
        else:
            session, node.session = node.session, None
            cached = len(session.token_ids)
            self.model.policy.append(session, new_ids)
        new_replies = [key for key in prompt.place[2] if key[0] == "assistant"]
        self.retokenised_turns += sum(key in self._replies for key in new_replies)
        return session, cached

    def add(
        self, node: TurnNode, reply: Message, sampled: Turn, call_ids: tuple[str, ...], has_stop_token: bool
    ) -> None:
        """Take in a turn that has been sampled."""
        prompt, node.reply, node.sampled, node.number = node.prompt, reply, sampled, len(self.nodes)
        node.call_ids, node.has_stop_token = call_ids, has_stop_token
        self.nodes.append(node)
        self._mark_used(prompt)
        self._unused[node] = None
        if len(self._unused) > _MAX_UNUSED:
            del self._unused[next(iter(self._unused))]
        parent, opening, new_keys = prompt.place
        self._lengths.setdefault((parent, opening), {})[len(new_keys)] = None
        keys = reply_keys(reply)
        self._replies.add(keys[0])
        for key in keys:
            self._by_reply.setdefault((prompt.place, key), []).append(node)

    def take_number(self, place: Place) -> int:
        """Reserve the lowest free number of a turn at this place. It decides the seed."""
        taken = self._numbers.setdefault(place, set())
        number = next(i for i in range(len(taken) + 1) if i not in taken)
        taken.add(number)
        return number

    def free_number(self, place: Place, number: int) -> None:
        """Release the number of a turn that was not sampled, so that the same request gets the same answer again."""
        self._numbers[place].discard(number)

    def close(self) -> None:
        for node in self.nodes:
            if node.session is not None:
                self.prompts.close_session(node.session)
                node.session = None

    def rows(self) -> Iterator[tuple[TurnNode, tuple[Turn, ...]]]:
        """Each lineage's leaf and turns. A turn is trained in one row; in all others it is context."""
        trained, owners = self.trained_nodes(), dict[TurnNode, TurnNode]()
        # each turn is trained in the row of one leaf, preferably of one that is not cut off, since that may be masked
        for leaf in sorted(self.leaves, key=lambda leaf: (leaf.is_cut_off, leaf not in trained)):
            for node in leaf.path:
                owners.setdefault(node, leaf)
        for leaf in self.leaves:
            turns: list[Turn] = []
            for node in leaf.path:
                is_own = owners[node] is leaf
                turns += node.prompt.new_turns if is_own else map(_as_context, node.prompt.new_turns)
                turns.append(node.sampled if is_own and node in trained else _as_context(node.sampled))
            yield leaf, tuple(turns)

    def trained_nodes(self) -> set[TurnNode]:
        """The turns that get the attempt's reward: those that a later request contains, and final ones.

        Final are the last turn of each conversation of several turns, of the attempt, and of its longest lineage. Where
        no conversation has several turns, the last answer to each request is final. All others get no reward: rejected
        choices (n > 1), answers to repeated requests, and side calls of one turn that nothing builds on.
        """
        if not self.nodes:
            return set()
        last, used = self.nodes[-1], {node for node in self.nodes if node.used}
        if not any(node.prompt.parent for node in self.nodes):
            answered, newest = {node.prompt.place for node in used}, {node.prompt.place: node for node in self.nodes}
            return used | {node for place, node in newest.items() if place not in answered}
        longest = max(self.leaves, key=lambda leaf: (len(leaf.path), leaf.token_count, leaf.number))
        trained = used | ({last} if longest.prompt.place == last.prompt.place else {last, longest})
        last_children = {node.prompt.parent: node for node in self.nodes if node.prompt.parent is not None}
        continued = {node.prompt.parent for node in trained}
        return trained | {child for parent, child in last_children.items() if parent not in continued}

    def _mark_used(self, prompt: Prompt) -> None:
        """Mark the turns that a request contains: the one it continues, and those it quotes in a changed history."""
        parent = prompt.parent
        if parent is not None:
            parent.continued = parent.used = True
            place = parent.prompt.place
            self._unused = {n: None for n in self._unused if n is not parent and n.prompt.place != place}
        if not self._unused:
            return
        texts = [message.text for message in prompt.new_messages if message.role != "assistant"]
        for node in list(self._unused):
            said = node.reply.text
            if any(key in prompt.place[2] for key in reply_keys(node.reply)) or any(said and said in t for t in texts):
                node.used = True
                del self._unused[node]

    def _find(self, messages: Sequence[Message], keys: list[Key], opening: str) -> tuple[TurnNode | None, int]:
        """The known turn with the longest history that this one begins with, and where the rest begins.

        Of several such turns (parallel ones may say the same) prefer the one with these ids of tool calls, then one
        that was not continued yet, then the first.
        """
        ids = {call.id for message in messages for call in message.tool_calls}
        best: tuple[tuple[int, ...], TurnNode | None, int] = ((0,), None, 0)
        paths: list[tuple[TurnNode | None, int, int]] = [(None, 0, 0)]
        while paths:
            node, start, known_ids = paths.pop()
            for end in [start + length for length in self._lengths.get((node, opening), ())]:
                if end >= len(keys) or messages[end].role != "assistant":
                    continue
                place = (node, opening, tuple(keys[start:end]))
                for child in self._by_reply.get((place, keys[end]), ()):
                    known = known_ids + sum(call_id in ids for call_id in child.call_ids)
                    rank = (end + 1, known, not child.continued, -child.number)
                    if rank > best[0]:
                        best = rank, child, end + 1
                    paths.append((child, end + 1, known))
        return best[1], best[2]


def _in_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of tokens that both begin with."""
    return bisect_left(range(min(len(a), len(b))), True, key=lambda i: a[: i + 1] != b[: i + 1])


def _with_call_names(messages: Sequence[Message], calls: Sequence[ToolCall] | None = None) -> Iterator[Message]:
    """Tool results with the names of their calls, which some templates show.

    `calls` replace those of the first message, whose ids are the client's and not the model's own.
    """
    by_id: dict[str | None, ToolCall] = {}
    for i, message in enumerate(messages):
        if message.role == "assistant":
            own = message.tool_calls if calls is None or i else calls
            by_id = dict(zip((call.id for call in message.tool_calls), own, strict=False))
        call = by_id.get(message.tool_call_id) if message.role == "tool" else None
        yield message if call is None else replace(message, tool_call_id=call.id, name=call.name)


def _continuation(
    model: Completer, new_messages: Sequence[Message], variables: Mapping[str, Any], node: TurnNode
) -> tuple[Turn, ...] | None:
    """Tokenise messages behind a turn; None if the template cannot append them, so the history is rendered again."""
    if _characters(new_messages) > MAX_INLINE_CHARS:
        model.check_tokens(message.text for message in new_messages)
    try:
        last = int(node.sampled.token_ids[-1]) if node.has_stop_token else None
        return model.chat.continuation(new_messages, variables, after_stop_token=node.has_stop_token, last_token=last)
    except PalestraError:
        return None


def _characters(messages: Sequence[Message]) -> int:
    """Approximate number of characters of all texts and of the calls' arguments."""
    calls = [call.arguments for message in messages for call in message.tool_calls]
    return sum(len(message.text) for message in messages) + (len(marshal.dumps(calls, 2)) if calls else 0)


def _as_context(turn: Turn) -> Turn:
    """The turn's tokens without anything to learn from them."""
    return turn if turn.maker == "template" else Turn("template", turn.token_ids, routing=turn.routing)


def _with_ids(turns: tuple[Turn, ...] | None) -> Any:
    """The turns and their tokens as a list; None stays None. Takes milliseconds for a long prompt."""
    return None if turns is None else (turns, _ids(turns))


def _ids(turns: Sequence[Turn]) -> list[int]:
    return [token for turn in turns for token in turn.token_ids.tolist()]
