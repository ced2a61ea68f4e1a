"""The conversations of one attempt as a tree of sampled turns: a path from a root to a leaf is a lineage.

A request whose history leads to a known turn goes on from there, with exactly the tokens that were sampled. Any other
history opens a branch: at the last turn that it shares with a known conversation, or at a root of its own.
"""

from __future__ import annotations

import marshal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from palestra.core.errors import PalestraError
from palestra.core.types import Message, ToolCall, Turn
from palestra.servers.gateway.matching import Key, opening_key, reply_keys, request_keys
from palestra.servers.gateway.shared_prompts import SharedPrompts
from palestra.servers.openai.completer import MAX_INLINE_CHARS, Completer, texts_of

_KEY_COST = 8  # times faster to compare a character than to tokenise it
_MAX_UNUSED = 64  # turns that later requests are searched for
Schemas = Sequence[dict[str, Any]]
Place = tuple["Node | None", str, tuple[Key, ...]]  # behind which turn, with which tools, after which messages


@dataclass(eq=False, slots=True, repr=False)
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
    used: bool = False  # a later request contains it: the agent has read it and built on it

    @property
    def is_cut_off(self) -> bool:
        """Whether the lineage ended in the middle of a turn, or was refused the next one."""
        return self.refused or self.sampled.finish != "stop"

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


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Prompt:
    """A place, the messages that are new there, and their tokens."""

    place: Place
    new_messages: tuple[Message, ...]
    new_turns: tuple[Turn, ...]
    tool_names: tuple[str, ...]

    @property
    def token_count(self) -> int:
        """How many tokens the session of this place holds."""
        node = self.place[0]
        return len(node.token_ids if node else ()) + sum(len(turn.token_ids) for turn in self.new_turns)


@dataclass(eq=False, slots=True, repr=False)
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

    model: Completer
    prompts: SharedPrompts
    nodes: list[Node] = field(default_factory=list)
    recomputed_tokens: int = 0  # of known turns from which somebody had gone on before, and the policy cannot branch
    retokenised_turns: int = 0  # sampled, and rendered again as text because the history before them had changed
    _by_reply: dict[tuple[Place, Key], list[Node]] = field(default_factory=dict)
    _lengths: dict[tuple[Node | None, str], dict[int, None]] = field(default_factory=dict)  # of the keys of places
    _unused: dict[Node, None] = field(default_factory=dict)  # the last turns that no request has contained so far
    _replies: set[Key] = field(default_factory=set)
    _numbers: dict[Place, set[int]] = field(default_factory=dict)

    @property
    def leaves(self) -> list[Node]:
        """The last turn of each lineage; the lineage that ended last is the last one."""
        return [node for node in self.nodes if not node.continued]

    async def place(self, messages: Sequence[Message], tools: Schemas, variables: Mapping[str, Any]) -> Prompt:
        """The place that a history leads to, with the tokens that are new there."""
        size = self._check_size(messages, tools)
        keys, opening = await self.model.prepare(
            size // _KEY_COST, lambda _: (request_keys(messages), opening_key(tools, variables))
        )
        node, start = self._find(messages, keys, opening)
        if node is not None:
            new_messages = tuple(_with_call_names(messages[start - 1 :], node.reply.tool_calls))[1:]
            new_turns = await self.model.prepare(
                _characters(new_messages), lambda model: _continuation(model, new_messages, variables, node)
            )
            if new_turns is not None:
                return Prompt((node, opening, tuple(keys[start:])), new_messages, new_turns, _names(tools))
        whole = tuple(_with_call_names(messages))
        prompt = await self.model.prepare(size, lambda model: self._prompt(model, whole, opening, tools, variables))
        return Prompt((None, opening, tuple(keys)), whole, (prompt,), _names(tools))

    def _prompt(
        self,
        model: Completer,
        messages: tuple[Message, ...],
        opening: str,
        tools: Schemas,
        variables: Mapping[str, Any],
    ) -> Turn:
        """The tokens of a whole history."""

        def make() -> Turn:
            if model is not self.model:  # in a thread: it may be far too long
                model.check_tokens([*(m.text for m in messages), *texts_of(tools)])
            return model.chat.prompt(messages, tools, variables)

        return self.prompts.render(messages, opening, make)

    def _check_size(self, messages: Sequence[Message], tools: Schemas) -> int:
        """Return the approximate number of characters of a history; PalestraError if it cannot fit the context."""
        tools_size = len(marshal.dumps(list(tools), 2)) if tools else 0
        if tools_size > self.model.max_characters:
            self.model.check_length(sum(map(len, texts_of(tools))))
        # old thinking may be left out of a prompt, so an assistant's text that has some does not count
        shown = (len(m.text) for m in messages if m.role != "assistant" or "think>" not in m.text)
        self.model.check_length(sum(shown))
        return tools_size + _characters(messages)

    def open(self, prompt: Prompt) -> Branch:
        """Open the session of a place. The caller samples there, and adds the turn or closes the session."""
        session, cached = self._session(prompt.place[0], prompt.new_turns)
        if self._replies and any(message.role == "assistant" for message in prompt.new_messages):
            new_keys = prompt.place[2]
            self.retokenised_turns += sum(key in self._replies for key in new_keys if key[0] == "assistant")
        return Branch(prompt.place, prompt.new_messages, prompt.new_turns, prompt.tool_names, session, cached)

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
        self._mark_used(branch)
        self._unused[node] = None
        if len(self._unused) > _MAX_UNUSED:
            del self._unused[next(iter(self._unused))]
        parent, opening, new_keys = branch.place
        self._lengths.setdefault((parent, opening), {})[len(new_keys)] = None
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
        """Each lineage's leaf and turns. A turn counts in one row alone; in all others it is context."""
        trained, owners = self.trained_nodes(), self._owners()
        for leaf in self.leaves:
            turns: list[Turn] = []
            for node in leaf.path:
                is_own = owners[node] is leaf
                turns += node.new_turns if is_own else map(_as_context, node.new_turns)
                turns.append(node.sampled if is_own and node in trained else _as_context(node.sampled))
            yield leaf, tuple(turns)

    def trained_nodes(self) -> set[Node]:
        """The turns that get the attempt's reward: those that a later request contains, and final ones.

        Final are the last turn of each conversation of several turns, of the attempt, and of its longest lineage. Where
        no conversation has several turns, the last answer to each request is final. All others get no reward: rejected
        choices (n > 1), answers to repeated requests, and side calls of one turn that nothing builds on.
        """
        if not self.nodes:
            return set()
        last, used = self.nodes[-1], {node for node in self.nodes if node.used}
        if not any(node.parent for node in self.nodes):
            answered = {node.place for node in used}
            return used | {n for n in {n.place: n for n in self.nodes}.values() if n.place not in answered}
        longest = max(self.leaves, key=lambda leaf: (len(leaf.path), len(leaf.token_ids), leaf.number))
        trained = used | ({last} if longest.place == last.place else {last, longest})
        last_children = {node.parent: node for node in self.nodes if node.parent is not None}
        went_on = {node.parent for node in trained}
        return trained | {child for parent, child in last_children.items() if parent not in went_on}

    def _owners(self) -> dict[Node, Node]:
        """The leaf in whose row a turn counts: one that is not cut off if there is any, since that may be masked."""
        trained, owners = self.trained_nodes(), dict[Node, Node]()
        for leaf in sorted(self.leaves, key=lambda leaf: (leaf.is_cut_off, leaf not in trained)):
            for node in leaf.path:
                owners.setdefault(node, leaf)
        return owners

    def _mark_used(self, branch: Branch) -> None:
        """Note which turns a request contains: the one it continues, and those it quotes in a changed history."""
        if branch.parent is not None:
            branch.parent.continued = branch.parent.used = True
            self._unused = {n: None for n in self._unused if n is not branch.parent and n.place != branch.parent.place}
        if not self._unused:
            return
        texts = [message.text for message in branch.new_messages if message.role != "assistant"]
        for node in list(self._unused):
            said = node.reply.text
            if any(key in branch.place[2] for key in reply_keys(node.reply)) or any(said and said in t for t in texts):
                node.used = True
                del self._unused[node]

    def _find(self, messages: Sequence[Message], keys: list[Key], opening: str) -> tuple[Node | None, int]:
        """The known turn with the longest history that this one begins with, and where the rest begins.

        Of several such turns (parallel ones may say the same) the one with these ids of tool calls, then one from
        which nobody has gone on, then the first.
        """
        ids = {call.id for message in messages for call in message.tool_calls}
        best: tuple[tuple[int, ...], Node | None, int] = ((0,), None, 0)
        paths: list[tuple[Node | None, int, int]] = [(None, 0, 0)]
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

    def _session(self, node: Node | None, new_turns: Sequence[Turn]) -> tuple[Any, int]:
        """A session that holds all tokens up to here, and how many of them it held before."""
        new = list(chain.from_iterable(turn.token_ids.tolist() for turn in new_turns))
        if node is None:
            return self.prompts.open(new)
        if node.session is None:
            known = node.token_ids
            session, cached = self.prompts.branch(known + new)
            self.recomputed_tokens += max(0, len(known) - cached)
            return session, cached
        session, node.session = node.session, None
        cached = len(session.token_ids)
        self.model.policy.append(session, new)
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


def _continuation(
    model: Completer, new_messages: Sequence[Message], variables: Mapping[str, Any], node: Node
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
    return turn if turn.maker == "template" else Turn("template", turn.token_ids)


def _names(tools: Schemas) -> tuple[str, ...]:
    return tuple(str(tool.get("function", tool).get("name", "")) for tool in tools)
