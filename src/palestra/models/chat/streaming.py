"""An assistant's text as it is sampled: reasoning whole, text as soon as it is certain, nothing of tool calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from palestra.models.chat.callformats import HARMONY, CallFormat, unexpected_opens
from palestra.models.chat.toolcalls import TAGS, Reply, split_reasoning

_FINAL, _ENDS = "<|channel|>final<|message|>", ("<|end|>", "<|return|>", "<|start|>")
_TAGS = tuple(tag for pair in TAGS for tag in pair)
_RESPONSE, _RESPONSE_END = "<response>", "</response>"  # Granite 3 wraps its answer when it thinks
_BEGINNINGS = (_RESPONSE, *(opening for opening, _ in TAGS))
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
        opens, self._at_start = unexpected_opens(format) if with_tools and format is not HARMONY else ((), ())
        self._holds = _ENDS if format is HARMONY else (*_TAGS, *opens)
        self._is_open = reasoning_is_open and format is not HARMONY
        self._unread: list[str] = []  # before the text begins
        self._awaited: tuple[str, ...] = (_FINAL,) if format is HARMONY else ()  # one of them ends the reasoning
        self._end = ""  # of what is unread, where one of them may have begun
        self._text: CertainText | None = None  # once it has begun
        self._sent: list[str] = []
        self._has_thought = False

    def push(self, new: str) -> Iterator[Delta]:
        """Yield the deltas that this text makes certain."""
        if self._holds_all:
            return
        if self._text is not None:
            yield from self._text_delta(self._text.push(new))
            return
        self._unread.append(new)
        self._end = self._end[-_LONGEST_TAG:] + new
        if not self._awaited or any(tag in self._end for tag in self._awaited):
            yield from self._begin("".join(self._unread))

    def _begin(self, start: str) -> Iterator[Delta]:
        """Read what comes before the text: whole reasoning, or the beginning of a tag."""
        if _FINAL in self._awaited:
            before, _, start = start.partition(_FINAL)
            yield from self._thinking_delta(split_reasoning(before)[0])
        self._awaited = ()
        while (pair := next((p for p in TAGS if start.lstrip().startswith(p[0])), None)) or self._is_open:
            self._awaited = (pair[1],) if pair else tuple(closing for _, closing in TAGS)
            if not any(tag in start for tag in self._awaited):
                self._unread, self._end = [start], start[-_LONGEST_TAG:]
                return
            reasoning, start = split_reasoning(start, self._is_open)
            if not self._has_thought:
                yield from self._thinking_delta(reasoning)
            self._is_open, self._awaited = False, ()
        start = start.lstrip()
        is_wrapped = self._has_thought and self._holds != _ENDS and start.startswith(_RESPONSE)
        body = start.removeprefix(_RESPONSE).lstrip() if is_wrapped else start
        if not body or any(tag.startswith(start) for tag in _BEGINNINGS):
            self._unread = [start]
        elif body.startswith(self._at_start or ("\0",)):
            self._holds_all = True
        else:
            self._text = CertainText((*self._holds, _RESPONSE_END) if is_wrapped else self._holds)
            yield from self._text_delta(self._text.push(body))

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


class CertainText:
    """A text that grows, up to the first held-back piece and without an end that may be the beginning of one.

    >>> text = CertainText(("<tool_call>",))
    >>> text.push("so <tool"), text.push("box> <tool_call>"), text.push("{")
    ('so ', '<toolbox> ', '')
    """

    def __init__(self, hold: Sequence[str]) -> None:
        self._hold = tuple(hold)
        self._held = ""

    def push(self, new: str) -> str:
        """Return what became certain."""
        if self._held.startswith(self._hold):
            return ""
        text = self._held + new
        end = min((text.find(piece) for piece in self._hold if piece in text), default=len(text))
        for piece in self._hold:
            for length in range(min(len(piece) - 1, len(text)), 0, -1):
                if text.endswith(piece[:length]):
                    end = min(end, len(text) - length)
                    break
        self._held = text[end:]
        return text[:end]
