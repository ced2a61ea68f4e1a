"""Demonstrations: conversations and earlier rollouts as rollouts that supervised stages train on, and their source.

A conversation gets the tokens that our agent loop would have: the prompt and the replies by the model's own chat
template, append-only, and each assistant message as a turn of the model, with calls in the model's own format.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from palestra.core.conversations import Conversation
from palestra.core.errors import InputError, PalestraError, UnreadableFileError
from palestra.core.files import append_jsonl, read_jsonl, write_jsonl
from palestra.core.group_codec import rollout_from_dict, rollout_to_dict
from palestra.core.run_folder import RunFolder
from palestra.core.types import Group, Message, Rollout, ToolCall, ToolResult, Turn
from palestra.models.chat.template import PROMPT_END_TOKENS, ChatFormat
from palestra.models.chat.written import takes_parallel_calls, write_reply
from palestra.train.group_source import GroupSource, draw

log = logging.getLogger("palestra")
Schemas = Sequence[dict[str, Any]]


class TooLongError(InputError):
    """A conversation with more tokens than the context."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One message of a conversation."""

    message: Message
    is_trained: bool = True


def demonstrations(
    conversations: Sequence[Conversation], chat: ChatFormat, tools: Schemas = (), *, max_tokens: int | None = None
) -> list[Rollout]:
    """One rollout per conversation; those of more than `max_tokens` tokens are skipped, and counted in the log."""
    rollouts: list[Rollout] = []
    skipped, left_out = 0, Counter[str]()
    for conversation in conversations:
        try:
            rollouts.append(demonstration(conversation, chat, tools, max_tokens=max_tokens))
        except TooLongError:
            skipped += 1
        else:
            left_out.update(rollouts[-1].info.get("left_out", ()))
    if skipped:
        log.warning("%d of %d conversations do not fit the context; skipped", skipped, len(conversations))
    for part, count in left_out.items():
        log.warning("the chat template writes no %s for %d of %d conversations", part, count, len(conversations))
    return rollouts


def demonstration(
    conversation: Conversation, chat: ChatFormat, tools: Schemas = (), *, max_tokens: int | None = None
) -> Rollout:
    """A conversation as a rollout. `tools` are the schemas of the agent's tools; the conversation's own if empty.

    Each assistant message is a `model` turn, one with weight 0 a `template` turn. PalestraError, which names the
    conversation, if the template refuses it or if its tokens do not read back as the same text and calls.
    """
    schemas = list(tools or conversation.tools)
    try:
        known = [str(schema.get("function", schema).get("name")) for schema in schemas]
        for message in conversation.messages:
            for call in message.tool_calls:
                if call.name not in known:
                    has = f"the tools are {', '.join(known)}" if known else "it has no tools"
                    raise InputError(f"it calls {call.name!r}, and {has}; give the schema of that tool, or take it out")
        rollout = _demonstration(conversation, _steps(conversation, chat), chat, schemas)
    except PalestraError as error:
        raise InputError(f"{conversation.origin}: {error}") from None
    count = sum(len(turn.token_ids) for turn in rollout.turns)
    if max_tokens is not None and count > max_tokens:
        raise TooLongError(
            f"{conversation.origin}: the conversation has {count} tokens, and the context {max_tokens}; shorten it, "
            "take it out, or use a longer context"
        )
    return rollout


def as_demonstrations(rollout: Rollout) -> list[Rollout]:
    """A rollout's conversations as demonstrations: the tokens as sampled, all with advantage 1.

    Its log-probabilities and versions are those of another policy, so they are left out.
    """
    demonstrated = []
    for part in rollout.conversations:
        turns = tuple(_model_turn(turn.token_ids) if turn.maker == "model" else turn for turn in part.turns)
        if any(turn.maker == "model" and len(turn.token_ids) for turn in turns):
            results = rollout.tool_results if part is rollout else ()
            own = replace(rollout, messages=part.messages, stop=part.stop, tool_results=results)
            demonstrated.append(replace(own, turns=turns, lineages=(), advantages=_ones(turns), reward=1.0))
    return demonstrated


def read_run(folder: RunFolder, per_problem: int | None = None) -> list[Rollout]:
    """Rollouts of an earlier run that passed, as demonstrations for the same model (the tokens are that model's).

    Each sequence of tokens comes once. The best rollout of each problem comes first, then the second best, and so on;
    at most `per_problem` of each.
    """
    by_problem: dict[str, list[tuple[float, Rollout]]] = defaultdict(list)
    seen: set[bytes] = set()
    for rollout in _passed(folder):
        for each in as_demonstrations(rollout):
            key = np.concatenate([turn.token_ids for turn in each.turns]).tobytes()
            if key not in seen:
                seen.add(key)
                by_problem[rollout.problem_id].append((rollout.reward, each))
    ranked = [sorted(own, key=lambda pair: -pair[0])[:per_problem] for own in by_problem.values()]
    return [pair[1] for row in zip_longest(*ranked) for pair in row if pair is not None]


def run_conversations(folder: RunFolder, tools: Schemas = ()) -> list[Conversation]:
    """Conversations of an earlier run's rollouts that passed, for another model. Each comes once."""
    conversations: dict[str, Conversation] = {}
    for number, rollout in enumerate(_passed(folder)):
        origin = f"{folder.rollouts_file}, rollout {number} that passed"
        conversations.setdefault(repr(rollout.messages), Conversation(rollout.messages, tuple(tools), origin))
    return list(conversations.values())


def _passed(folder: RunFolder) -> Iterator[Rollout]:
    if not folder.rollouts_file.is_file():
        raise UnreadableFileError(f"{folder.path} has no rollouts.jsonl; give the folder of a run that has trained")
    for number, row in enumerate(folder.rollouts(), start=1):
        if not row.get("passed"):
            continue
        try:
            rollout = rollout_from_dict(row)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UnreadableFileError(
                f"{folder.rollouts_file}, row {number} is no rollout ({type(error).__name__}: {error}); "
                "restore the file from a copy"
            ) from None
        if rollout.error is None and not rollout.cut_off:
            yield rollout


def _steps(conversation: Conversation, chat: ChatFormat) -> list[_Step]:
    """The messages; parallel calls one after the other for a template that writes one call per message."""
    steps = [_Step(message, i not in conversation.untrained) for i, message in enumerate(conversation.messages)]
    if all(len(step.message.tool_calls) < 2 for step in steps) or takes_parallel_calls(chat):
        return steps
    single: list[_Step] = []
    while steps:
        step = steps.pop(0)
        calls = step.message.tool_calls
        if len(calls) < 2:
            single.append(step)
            continue
        results = list(takewhile(lambda each: each.message.role == "tool", steps))
        del steps[: len(results)]
        for call in calls:
            single.append(replace(step, message=replace(step.message, tool_calls=(call,))))
            single += [result for result in results if result.message.tool_call_id == call.id]
            step = replace(step, message=replace(step.message, text="", reasoning=""))  # before the first call
    return single


def _demonstration(conversation: Conversation, steps: Sequence[_Step], chat: ChatFormat, schemas: Schemas) -> Rollout:
    first = next(i for i, step in enumerate(steps) if step.message.role == "assistant")
    messages = [step.message for step in steps[:first]]
    turns = [chat.prompt(messages, schemas)]
    calls: dict[str | None, ToolCall] = {}  # of the last assistant message, by the conversation's ids
    replies: list[Message] = []
    results: list[ToolResult] = []
    left_out: set[str] = set()
    for step in steps[first:]:
        if step.message.role != "assistant":
            reply = step.message
            if reply.role == "tool":  # with the id of its call as the model wrote it
                call = calls.get(reply.tool_call_id)
                if call is None:
                    raise InputError(
                        f"a tool result belongs to no call before it (id {reply.tool_call_id!r}); take it out"
                    )
                reply = replace(reply, tool_call_id=call.id, name=call.name)
                results.append(ToolResult(call, reply.text))
            replies.append(reply)
            continue
        if len(messages) > first:  # not the first assistant message
            turns += chat.continuation(replies, last_token=int(turns[-1].token_ids[-1]))
        after = (*messages, *replies)[-1].role
        prompt_end = [i for turn in turns[-4:] for i in turn.token_ids.tolist()][-PROMPT_END_TOKENS:]
        own = step.message
        if chat.call_format.name == "kimi":  # its models write the name of the tool into the id of a call
            numbered = enumerate(own.tool_calls, start=len(results))
            own = replace(own, tool_calls=tuple(replace(c, id=f"functions.{c.name}:{i}") for i, c in numbered))
        written = write_reply(chat, own, schemas, after=after, prompt_end=prompt_end)
        ids = np.array(written.token_ids, np.int32)
        turns.append(_model_turn(ids) if step.is_trained else Turn("template", ids))
        messages += [*replies, written.message]
        read_back = zip(step.message.tool_calls, written.message.tool_calls, strict=True)
        calls, replies = {said.id: call for said, call in read_back}, []
        left_out |= {"text beside calls" if part == "text" else part for part in written.left_out}
    return Rollout(
        problem_id=conversation.origin,
        turns=tuple(turns),
        messages=tuple(messages),
        stop="answered",
        tool_results=tuple(results),
        reward=1.0,
        advantages=_ones(turns),
        tool_names=tuple(str(schema.get("function", schema).get("name")) for schema in schemas),
        info={"left_out": sorted(left_out)} if left_out else {},
    )


def _model_turn(token_ids: Any) -> Turn:
    count = len(token_ids)
    return Turn("model", token_ids, np.full(count, np.nan, np.float32), np.zeros(count, np.int32), "stop")


def _ones(turns: Sequence[Turn]) -> Any:
    return np.ones(sum(len(turn.token_ids) for turn in turns), np.float32)


class DemonstrationStore:
    """The demonstrations of a run, in a file of its folder, in the order in which they came."""

    def __init__(self, path: Path) -> None:
        """Read what the file has."""
        self._path = path
        self.rollouts = [rollout_from_dict(row) for row in read_jsonl(path)] if path.is_file() else []

    def __len__(self) -> int:
        return len(self.rollouts)

    def add(self, rollouts: Iterable[Rollout]) -> None:
        made = [each for rollout in rollouts for each in as_demonstrations(rollout)]
        new = [rollout_from_dict(rollout_to_dict(each, exact=True)) for each in made]
        self.rollouts += new  # exactly what a resumed run reads
        if new:
            append_jsonl(self._path, (rollout_to_dict(rollout, exact=True) for rollout in new))

    def cut(self, count: int) -> None:
        """Keep the first `count` demonstrations; a resumed run makes the rest again."""
        if len(self.rollouts) > count:
            del self.rollouts[count:]
            write_jsonl(self._path, (rollout_to_dict(rollout, exact=True) for rollout in self.rollouts))


@dataclass(slots=True)
class DemonstrationSource(GroupSource):
    """Demonstrations in an endless stream, reshuffled each epoch; the source of an sft stage."""

    store: DemonstrationStore
    seed: int
    first: int = 0  # of the store's demonstrations, that this stage learns from
    count: int = 0  # how many there are
    drawn: int = 0
    reward_weights: Mapping[str, float] = field(default_factory=dict)
    stage: str = "sft"
    is_done: bool = False
    ends_by_itself: bool = False  # the number of steps is not known before
    metrics: dict[str, float] = field(default_factory=dict)  # of the last step

    @property
    def samples_next(self) -> bool:
        """Whether the next step samples before it learns."""
        return False

    async def next(self, count: int, version: int) -> list[Group]:
        groups = self.draw(count)
        self.metrics = {"demonstrations": float(self.count)}
        return groups

    def draw(self, count: int) -> list[Group]:
        own = self.store.rollouts[self.first : self.first + self.count]
        chosen = draw(own, self.drawn, min(count, len(own)), self.seed)
        self.drawn += len(chosen)
        return [Group(rollout.problem_id, (rollout,)) for rollout in chosen]

    def state(self) -> dict[str, Any]:
        return {"first": self.first, "count": self.count, "drawn": self.drawn, "stored": len(self.store)}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state:
            self.first, self.count, self.drawn = (int(state[name]) for name in ("first", "count", "drawn"))
            self.store.cut(int(state["stored"]))


def sampled_key(rollout: Rollout) -> tuple[str, bytes]:
    """The problem and the tokens that the model sampled, for finding repetitions."""
    turns = (turn.token_ids.tobytes() for turn in rollout.turns if turn.maker == "model")
    return rollout.problem_id, b"|".join(turns)


def steps_for(demonstrations: int, epochs: float, batch: int) -> int:
    """Optimizer steps for this many epochs.

    >>> steps_for(40, 3, 16), steps_for(5, 2, 16)
    (8, 2)
    """
    return max(1, math.ceil(epochs * demonstrations / min(batch, demonstrations)))
