"""An assistant's text as it is sampled: reasoning whole, text as soon as it is certain, nothing of tool calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from palestra.models.chat.callformats import HARMONY, CallFormat
from palestra.models.chat.reasoning import TAGS, split_reasoning
from palestra.models.chat.toolcalls import Reply, unexpected_opens

_FINAL, _ENDS = "<|channel|>final<|message|>", ("<|end|>", "<|return|>", "<|start|>")
_OPENINGS = tuple(opening for opening, _ in TAGS)
_TAGS = tuple(tag for pair in TAGS for tag in pair)


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of a reply, or its whole reasoning."""

    text: str
    is_thinking: bool = False


class StreamedReply:
    """The deltas of one reply. Put together they are its reasoning and its text, but for whitespace at the end.

    With `holds_all` nothing is certain before the reply has ended: the texts that begin a call are not known.
    """

    def __init__(
        self, format: CallFormat, *, with_tools: bool, reasoning_is_open: bool, holds_all: bool = False
    ) -> None:
        self._holds_all = holds_all
        self._is_harmony = format is HARMONY
        self._opens, self._at_start = unexpected_opens(format) if with_tools else ((), ())
        self._is_open = reasoning_is_open
        self._written = ""
        self._sent = ""
        self._has_thought = False

    def push(self, new: str) -> Iterator[Delta]:
        """Yield the deltas that this text makes certain."""
        self._written += new
        if self._holds_all:
            return
        if self._is_harmony:
            yield from self._push_harmony()
            return
        start = self._written.lstrip()
        if not self._sent and not self._has_thought:
            pair = next((p for p in TAGS if start.startswith(p[0])), None)
            if pair is not None or self._is_open:
                if not any(close in start for _, close in ([pair] if pair else TAGS)):
                    return
                yield from self._thinking_delta(split_reasoning(self._written, self._is_open)[0])
            elif any(opening.startswith(start[: len(opening)]) for opening in _OPENINGS):
                return  # nothing yet, or the beginning of a tag
        spoken = split_reasoning(self._written, self._is_open)[1].lstrip() if self._has_thought else start
        if not self._sent and spoken.startswith(self._at_start or ("\0",)):
            return
        yield from self._text_delta(certain(spoken, (*_TAGS, *self._opens))[len(self._sent) :])

    def _push_harmony(self) -> Iterator[Delta]:
        before, tag, final = self._written.partition(_FINAL)
        if tag:
            if not self._has_thought:
                yield from self._thinking_delta(split_reasoning(before)[0])
            yield from self._text_delta(certain(final.lstrip(), _ENDS)[len(self._sent) :])

    def rest(self, reply: Reply, written: str) -> Iterator[Delta]:
        """Yield the deltas that were held back until the end of the reply, which was sampled as `written`."""
        if not self._has_thought:
            yield from self._thinking_delta(reply.reasoning)
        if reply.text.startswith(self._sent):
            yield from self._text_delta(reply.text[len(self._sent) :])
        elif reply.text != self._sent.rstrip():  # what was sent turned out to be reasoning: send all, tags included
            yield from self._text_delta(written.lstrip()[len(self._sent) :])

    def _thinking_delta(self, thinking: str) -> Iterator[Delta]:
        self._has_thought = True
        if thinking:
            yield Delta(thinking, is_thinking=True)

    def _text_delta(self, text: str) -> Iterator[Delta]:
        if text:
            self._sent += text
            yield Delta(text)


def certain(text: str, hold: Sequence[str]) -> str:
    """The text before the first held-back piece, and before an end that may be the beginning of one.

    >>> certain("so <tool", ("<tool_call>",)), certain("a STOP b", ("STOP",))
    ('so ', 'a ')
    """
    end = min((text.find(piece) for piece in hold if piece in text), default=len(text))
    for piece in hold:
        for length in range(min(len(piece) - 1, len(text)), 0, -1):
            if text.endswith(piece[:length]):
                end = min(end, len(text) - length)
                break
    return text[:end]
