"""An answer as it comes: thinking whole, text as soon as it is certain, and nothing of tool calls before their end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from palestra.core.types import SamplingParams
from palestra.gateway.request import Answer, ChatRequest, Delta, thinking_of
from palestra.serve.completer import Completer, TextStream, certain, decode

_OPEN, _CLOSE = "<think>", "</think>"


class ReplyStream:
    """The deltas of one answer. Put together they are its text, but for whitespace at the end."""

    def __init__(self, model: Completer, request: ChatRequest, params: SamplingParams, prompt: Sequence[int]) -> None:
        opens = model.chat.call_form.opens if request.tools and request.reads_calls else ()
        self._text = TextStream(model.tokenizer, (*params.stop, *opens), params.stop_token_ids)
        self._written = ""  # and certain, thinking included
        self._sent = ""
        self._thinks = decode(model.tokenizer, prompt).rstrip().endswith(_OPEN)
        self._has_thought = False

    def push(self, ids: Sequence[int]) -> Iterator[Delta]:
        """What is new now that these tokens are there."""
        new = self._text.push(ids)
        if not new:
            return
        self._written += new
        start = self._written.lstrip()
        if not self._sent and not self._has_thought and (self._thinks or start.startswith(_OPEN)):
            if _CLOSE not in start:
                return
            yield from self._thinking_delta(thinking_of(start))
        elif not self._sent and _OPEN.startswith(start[: len(_OPEN)]):
            return  # nothing yet, or the beginning of the tag
        spoken = start.partition(_CLOSE)[2].lstrip() if self._has_thought else start
        yield from self._text_delta(certain(spoken, (_OPEN, _CLOSE))[len(self._sent) :])

    def rest(self, answer: Answer) -> Iterator[Delta]:
        """What was held back until the answer ended."""
        if not self._has_thought:
            yield from self._thinking_delta(answer.thinking)
        text = answer.message.text
        if text.startswith(self._sent):
            yield from self._text_delta(text[len(self._sent) :])
        elif text != self._sent.rstrip():  # the text turned out to be thinking: by the rule of matching it still is
            yield from self._text_delta(answer.completion.text.lstrip()[len(self._sent) :])

    def _thinking_delta(self, thinking: str) -> Iterator[Delta]:
        self._has_thought = True
        if thinking:
            yield Delta(thinking, is_thinking=True)

    def _text_delta(self, text: str) -> Iterator[Delta]:
        if text:
            self._sent += text
            yield Delta(text)
