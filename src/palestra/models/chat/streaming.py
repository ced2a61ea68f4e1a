"""An assistant's text as it is sampled: reasoning whole, text as soon as it is certain, nothing of tool calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from palestra.models.chat.callformats import HARMONY, CallFormat
from palestra.models.chat.reasoning import TAGS, split_reasoning
from palestra.models.chat.toolcalls import Reply, unexpected_opens

_FINAL, _ENDS = "<|channel|>final<|message|>", ("<|end|>", "<|return|>", "<|start|>")
_TAGS = tuple(tag for pair in TAGS for tag in pair)
_RESPONSE, _RESPONSE_END = "<response>", "</response>"  # Granite 3 wraps its answer when it thinks
_LONGEST_TAG = 40


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
        self._unread: list[str] = []  # before the text
        self._awaited: tuple[str, ...] = (_FINAL,) if self._is_harmony else ()  # one of these ends the reasoning
        self._end = ""  # of what is unread, where one of the awaited tags may have begun
        self._text: CertainText | None = None  # once it has begun
        self._has_text = False  # apart from whitespace
        self._sent: list[str] = []
        self._has_thought = False

    def push(self, new: str) -> Iterator[Delta]:
        """Yield the deltas that this text makes certain."""
        if self._holds_all:
            return
        if self._text is not None:
            new = new if self._has_text else new.lstrip()
            self._has_text = self._has_text or bool(new)
            yield from self._text_delta(self._text.push(new))
            return
        self._unread.append(new)
        self._end = self._end[-_LONGEST_TAG:] + new
        if not self._awaited or any(tag in self._end for tag in self._awaited):
            yield from (self._begin_harmony if self._is_harmony else self._begin)("".join(self._unread))

    def _begin_harmony(self, written: str) -> Iterator[Delta]:
        before, _, final = written.partition(_FINAL)
        yield from self._thinking_delta(split_reasoning(before)[0])
        self._text = CertainText(_ENDS)
        yield from self.push(final)

    def _begin(self, written: str) -> Iterator[Delta]:
        """Read what comes before the text: whole reasoning, or the beginning of a tag."""
        while True:
            start = written.lstrip()
            pair = next((p for p in TAGS if start.startswith(p[0])), None)
            if pair is None and not self._is_open:
                break
            self._awaited = (pair[1],) if pair else tuple(closing for _, closing in TAGS)
            if not any(tag in start for tag in self._awaited):
                self._unread, self._end = [written], written[-_LONGEST_TAG:]
                return
            reasoning, written = split_reasoning(written, self._is_open)
            if not self._has_thought:
                yield from self._thinking_delta(reasoning)
            self._is_open, self._awaited = False, ()
        is_wrapped = self._has_thought and start.startswith(_RESPONSE)
        start = start.removeprefix(_RESPONSE).lstrip() if is_wrapped else start
        tags = (*(opening for opening, _ in TAGS), *(_RESPONSE,) * self._has_thought)
        if any(tag.startswith(start) and tag != start for tag in tags):  # nothing yet, or the beginning of a tag
            self._unread = [written.strip()]
        elif start.startswith(self._at_start or ("\0",)):
            self._holds_all = True
        else:
            self._text = CertainText((*_TAGS, *self._opens, *(_RESPONSE_END,) * is_wrapped))
            yield from self.push(start)

    def rest(self, reply: Reply, written: str) -> Iterator[Delta]:
        """Yield the deltas that were held back until the end of the reply, which was sampled as `written`."""
        if not self._has_thought:
            yield from self._thinking_delta(reply.reasoning)
        sent = "".join(self._sent)
        if reply.text.startswith(sent):
            yield from self._text_delta(reply.text[len(sent) :])
        elif reply.text != sent.rstrip():  # what was sent turned out to be reasoning: send all, tags included
            yield from self._text_delta(written.lstrip()[len(sent) :])

    def _thinking_delta(self, thinking: str) -> Iterator[Delta]:
        self._has_thought = True
        if thinking:
            yield Delta(thinking, is_thinking=True)

    def _text_delta(self, text: str) -> Iterator[Delta]:
        if text:
            self._sent.append(text)
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


class CertainText:
    """The certain part of a text that grows; see `certain`. The work does not grow with the text."""

    def __init__(self, hold: Sequence[str]) -> None:
        self._hold = tuple(hold)
        self._held = ""
        self._has_ended = False

    def push(self, new: str) -> str:
        """The text that became certain."""
        if self._has_ended:
            return ""
        text = self._held + new
        safe = certain(text, self._hold)
        self._held = text[len(safe) :]
        self._has_ended = bool(self._hold) and self._held.startswith(self._hold)
        return safe
