"""Messages to text, with a time limit, and text to tokens with their makers.

Message bodies are the environment's, the scaffold around them is the template's.
Bodies are found by marks: the template renders a conversation once more with a mark in the place of each body.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, takewhile
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np

from palestra.core.errors import PalestraError, UnsupportedError, UserCodeError
from palestra.core.text import encodable
from palestra.core.time_limit import TimeLimitError, time_limit
from palestra.core.types import Maker, Message, Turn

MAX_CACHED = 1024
Value = TypeVar("Value")
# A tool to examine templates with.
PROBE = {
    "type": "function",
    "function": {"name": "palestra_probe", "description": "", "parameters": {"type": "object", "properties": {}}},
}
RENDER_S = 10.0  # a real template takes milliseconds


class TemplateRefusal(UnsupportedError):
    """The template takes no such messages."""


def render(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] = (),
    add_generation_prompt: bool = False,
    **variables: Any,
) -> str:
    """The conversation as text; `variables` are the template's own."""
    try:
        with time_limit(RENDER_S):
            text: str = tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **variables,
            )
    except TimeLimitError:
        raise UserCodeError(
            f"the chat template took longer than {RENDER_S:g} s for {len(messages)} messages; "
            "set tokenizer.chat_template to one that ends"
        ) from None
    except Exception as error:  # jinja2's own, and whatever an expression in a template raises
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise TemplateRefusal(f"the chat template refuses messages with the roles {roles}: {error}") from None
    return text


def cached(known: dict[Any, Value], key: Any, make: Callable[[], Value]) -> Value:
    """The value of a key, made at its first use."""
    if key not in known:
        if len(known) >= MAX_CACHED:
            known.clear()
        known[key] = make()
    return known[key]


@dataclass(frozen=True)
class Piece:
    """A stretch of rendered text: a message's body, or the template's scaffold around it."""

    text: str
    is_body: bool


def mark(index: int) -> str:
    return f"PALESTRABODY{index}END"


def split_at_marks(text: str, count: int) -> tuple[str, ...]:
    scaffold = []
    for index in range(count):
        head, separator, text = text.partition(mark(index))
        if not separator:
            raise not_append_only("it leaves out a message, or puts messages in another order")
        scaffold.append(head)
    return (*scaffold, text)


def with_texts(message: Message, change: Callable[[str], str]) -> Message:
    """The message with each of its texts changed: its content, its name, and those in its calls."""
    calls = tuple(
        replace(call, name=change(call.name), arguments=_with_strings(call.arguments, change))
        for call in message.tool_calls
    )
    name = None if message.name is None else change(message.name)
    return replace(message, text=change(message.text), tool_calls=calls, name=name)


def _with_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(str(key)): _with_strings(each, change) for key, each in value.items()}
    return [_with_strings(each, change) for each in value] if isinstance(value, list) else value


_BODY_FORMS: tuple[Callable[[str], str], ...] = (
    str,
    str.strip,
    str.lstrip,
    str.rstrip,
    lambda body: json.dumps(body)[1:-1],
    lambda body: json.dumps(body, ensure_ascii=False)[1:-1],
)


def cut_into_pieces(text: str, scaffold: Sequence[str], bodies: Sequence[str]) -> list[Piece]:
    """Cut a rendered text into scaffold and bodies; a body may come trimmed, or escaped as JSON."""
    pieces = [Piece(scaffold[0], False)]
    position = len(scaffold[0])
    for body, behind in zip(bodies, scaffold[1:], strict=True):
        written = next((f for form in _BODY_FORMS if text.startswith((f := form(body)) + behind, position)), None)
        if written is None:
            break
        pieces += [Piece(written, True), Piece(behind, False)]
        position += len(written) + len(behind)
    if "".join(piece.text for piece in pieces) != text:
        raise not_append_only("the text of a message changes what is written around it")
    return pieces


@dataclass(slots=True)
class ForgedTexts:
    """Texts of messages that hold the text of a special token, which must not become one; a mark stands for each."""

    is_forged: Callable[[str], bool]
    texts: list[str] = field(default_factory=list)

    def marked(self, text: str) -> str:
        """The text itself, or the mark that stands for it."""
        if not self.is_forged(text):  # these stay: a template may write an empty text otherwise
            return text
        self.texts.append(text)
        return mark(len(self.texts) - 1)

    def cut(self, text: str, with_marks: str) -> list[Piece]:
        """Cut a rendered text at the marks of another rendering, which may have some of them, in any order."""
        parts = re.split(r"PALESTRABODY(\d+)END", with_marks)
        bodies = [self.texts[i] if i < len(self.texts) else mark(i) for i in map(int, parts[1::2])]
        return cut_into_pieces(text, parts[::2], bodies)


@dataclass(slots=True)
class TokenRuns:
    """Token ids by their makers: neighbours of one maker are one run."""

    runs: list[tuple[Maker, list[int]]] = field(default_factory=list)

    def add(self, maker: Maker, token_ids: Iterable[int]) -> None:
        if self.runs and self.runs[-1][0] == maker:
            self.runs[-1][1].extend(token_ids)
        else:
            self.runs.append((maker, list(token_ids)))

    def turns(self) -> tuple[Turn, ...]:
        return tuple(Turn(maker, np.array(ids, np.int32)) for maker, ids in self.runs if ids)


def not_append_only(reason: str) -> PalestraError:
    return UserCodeError(
        f"the chat template cannot be extended message by message: {reason}. Train with a template that only "
        "appends (ChatML templates do): set tokenizer.chat_template."
    )


MAX_SEGMENTS, MAX_SEGMENT_CHARS = 4096, 32_768
MAX_PROBES = 32
MAX_CHARS_WITH_GIL = 4096
_EDGE_CHARS, _EDGE_TOKENS = 1024, 64  # of a long text: tokenised with offsets, and compared
_PROBE = "Say 12 words.\n {}\nno\t{} 3+4{}yes {}{}\n\nEnd"  # beginnings and ends that tokenizers treat differently
_IN_BODY, _IN_SCAFFOLD = b"\1", b"\0"  # of a rendered text, character by character


class SegmentTokenizer:
    """Text to token ids, with what stands between two added tokens (`<|im_start|>`, …) remembered.

    A tokenizer cuts a text at its added tokens before it does anything else. Instructions, tools and examples are the
    same in every prompt of a training, and so are tokenised once. Where a tokenizer looks beyond such a cut, as some
    do at the beginning of a text, each text is tokenised whole.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer  # without the checks around it, which take longer than the work
        added = list(tokenizer.added_tokens_decoder.values())
        texts = sorted({str(token.content) for token in added} - {""}, key=len, reverse=True)  # the longest wins
        self._cut = re.compile(f"({'|'.join(map(re.escape, texts))})") if texts else None
        self._known: dict[str, list[int]] = {}
        normalizes = self._backend.normalizer is not None
        if any(t.lstrip or t.rstrip or t.single_word or (t.normalized and normalizes) for t in added):
            self._cut = None
        for probe in (_PROBE.replace("{}", str(token.content)) for token in added[:MAX_PROBES]):
            # a text that is cut at these tokens has the tokens of its parts
            if self._cut is not None and self.ids(probe) != self._whole(probe):
                self._cut = None

    def ids(self, text: str) -> list[int]:
        return [token_id for segment in self.segments(text) for token_id in self.known(segment)]

    def segments(self, text: str) -> list[str]:
        """The text cut where its tokens can be, too."""
        return [text] if self._cut is None else [segment for segment in self._cut.split(text) if segment]

    def known(self, segment: str) -> list[int]:
        """The tokens of one segment, remembered, unless every text is one."""
        if segment in self._known:
            return self._known[segment]
        ids = self._whole(segment)
        if self._cut is not None and len(segment) <= MAX_SEGMENT_CHARS:
            if len(self._known) >= MAX_SEGMENTS:
                self._known.clear()
            self._known[segment] = ids
        return ids

    def encode(self, text: str, split_special_tokens: bool = False) -> Any:
        """The tokens of a whole text, with the characters that each covers."""
        self._reset(split_special_tokens)
        if len(text) > MAX_CHARS_WITH_GIL:  # unlike encode, encode_batch lets other threads run
            return self._backend.encode_batch([encodable(text)], add_special_tokens=False)[0]
        return self._backend.encode(encodable(text), add_special_tokens=False)

    def _reset(self, split_special_tokens: bool) -> None:
        """Undo settings of the tokenizer that others may have made."""
        if self._backend.truncation is not None:
            self._backend.no_truncation()
        if self._backend.padding is not None:
            self._backend.no_padding()
        self._backend.encode_special_tokens = split_special_tokens

    def encode_long(
        self, text: str, start: int, end: int, split_special_tokens: bool = False
    ) -> tuple[list[int], int, int] | None:
        """The tokens of a long text, and the first and the end of those that lie within its characters [start, end).

        Offsets of many tokens hold the GIL for long, so they are looked up at both edges alone. None for a text that
        is short, or whose edges are tokenised differently on their own.
        """
        if end - start <= MAX_CHARS_WITH_GIL:
            return None
        ids = self._many_ids(text, split_special_tokens)
        head = self.encode(text[: start + _EDGE_CHARS], split_special_tokens)
        tail = self.encode(text[end - _EDGE_CHARS :], split_special_tokens)
        first = sum(1 for _ in takewhile(lambda at: not start <= at[0] < at[1], head.offsets))
        behind = sum(1 for _ in takewhile(lambda at: not at[0] < at[1] <= _EDGE_CHARS, reversed(tail.offsets)))
        left, right = first + _EDGE_TOKENS, behind + _EDGE_TOKENS
        if head.ids[:left] != ids[:left] or tail.ids[-right:] != ids[-right:]:
            return None
        return ids, first, len(ids) - behind

    def _many_ids(self, text: str, split_special_tokens: bool) -> list[int]:
        """The tokens of a long text, without the GIL: with offsets, even freeing them would hold it for long."""
        self._reset(split_special_tokens)
        return list(self._backend.encode_batch_fast([encodable(text)], add_special_tokens=False)[0].ids)

    def _whole(self, text: str) -> list[int]:
        return self._many_ids(text, False) if len(text) > MAX_CHARS_WITH_GIL else list(self.encode(text).ids)


class PieceTokenizer:
    """Pieces of a rendered conversation to token ids with their makers."""

    def __init__(self, segments: SegmentTokenizer, special_tokens: Iterable[str]) -> None:
        self._segments = segments
        self._special = re.compile("|".join(map(re.escape, special_tokens)) or r"(?!)")

    def has_special(self, text: str) -> bool:
        return self._special.search(text) is not None

    def encode(self, pieces: Sequence[Piece]) -> TokenRuns:
        """Token ids with their makers. The text is tokenised as a whole, except for bodies that contain the text of a
        special token: those are tokenised apart, as plain text, so that no message can forge a special token."""
        runs = TokenRuns()
        together: list[Piece] = []
        for piece in pieces:
            if piece.is_body and self.has_special(piece.text):
                self._encode_together(together, runs)
                self._encode_segment(piece.text, _IN_BODY * len(piece.text), runs, split_special_tokens=True)
                together = []
            else:
                together.append(piece)
        self._encode_together(together, runs)
        return runs

    def _encode_together(self, pieces: Sequence[Piece], runs: TokenRuns) -> None:
        text = "".join(piece.text for piece in pieces)
        places = b"".join((_IN_BODY if piece.is_body else _IN_SCAFFOLD) * len(piece.text) for piece in pieces)
        start = 0
        for segment in self._segments.segments(text):
            of_segment = places[start : start + len(segment)]
            if _IN_BODY in of_segment:
                self._encode_segment(segment, of_segment, runs)
            else:
                runs.add("template", self._segments.known(segment))
            start += len(segment)

    def _encode_segment(self, text: str, places: bytes, runs: TokenRuns, *, split_special_tokens: bool = False) -> None:
        """Tokens of a text that is a body in some places. One that also covers scaffold is not the environment's."""
        body, end = places.find(_IN_BODY), places.rfind(_IN_BODY) + 1
        is_one = _IN_SCAFFOLD not in places[body:end]
        if is_one and (long := self._segments.encode_long(text, body, end, split_special_tokens)):
            ids, first, behind = long
            runs.add("template", ids[:first])
            runs.add("environment", ids[first:behind])
            runs.add("template", ids[behind:])
            return
        encoded = self._segments.encode(text, split_special_tokens)
        inside = [start < end and _IN_SCAFFOLD not in places[start:end] for start, end in encoded.offsets]
        for is_body, run in groupby(zip(inside, encoded.ids, strict=True), itemgetter(0)):
            runs.add("environment" if is_body else "template", [token_id for _, token_id in run])


_PLAIN = "7"  # stands for any plain reply: it makes no added token with what is around it


class ReplyTemplate:
    """The text of a template before and behind one reply.

    A text is tokenised between its added tokens; the reply shares such a segment with what stands next to it, and only
    this segment is tokenised for each reply.
    """

    def __init__(self, segments: SegmentTokenizer, before: str, behind: str, *, without_first: bool) -> None:
        """`without_first`: the first token before the reply is there already."""
        *opening, left = segments.segments(before + _PLAIN)
        right, *ending = segments.segments(_PLAIN + behind)
        self._segments = segments
        self._left, self._right = left.removesuffix(_PLAIN), right.removeprefix(_PLAIN)
        self._before = [i for segment in opening for i in segments.known(segment)]
        self._behind = [i for segment in ending for i in segments.known(segment)]
        self._fits = bool(self._before) or not without_first  # else the first token is one of the reply's segment
        if without_first:
            del self._before[:1]
        self._made: dict[tuple[int, ...], Turn] = {}

    def turns(self, reply: str) -> tuple[Turn, ...] | None:
        """The reply as an `environment` turn between two of the template; None where it is not so simple."""
        if len(reply) > MAX_CHARS_WITH_GIL:
            return None
        encoded = self._segments.encode(self._left + reply + self._right)
        first, end = len(self._left), len(self._left) + len(reply)
        inside = [first <= a < b <= end for a, b in encoded.offsets]
        count = sum(inside)
        if not self._fits or not count:
            return None
        at, ids = inside.index(True), encoded.ids
        if not all(inside[at : at + count]):
            return None
        turns = [Turn("environment", np.array(ids[at : at + count], np.int32))]
        # nearly always the same as for the reply before
        if before := (*self._before, *ids[:at]):
            turns.insert(0, cached(self._made, before, lambda: Turn("template", np.array(before, np.int32))))
        if behind := (*ids[at + count :], *self._behind):
            turns.append(cached(self._made, behind, lambda: Turn("template", np.array(behind, np.int32))))
        return tuple(turns)
