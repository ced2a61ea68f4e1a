"""A rendered conversation cut into the messages' bodies and the template's scaffold around them.

Bodies are found by marks: the template writes a conversation once more with a mark in the place of each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from palestra.core.errors import PalestraError
from palestra.core.types import Maker, Message, Turn


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
        head, found, text = text.partition(mark(index))
        if not found:
            raise not_append_only("it leaves out a message, or puts messages in another order")
        scaffold.append(head)
    return (*scaffold, text)


def at_marks(text: str) -> tuple[list[str], list[int]]:
    """What stands between marks, and which these are: a template may leave some out, or write them in another order."""
    parts = re.split(r"PALESTRABODY(\d+)END", text)
    return parts[::2], [int(index) for index in parts[1::2]]


def with_texts(message: Message, change: Callable[[str], str]) -> Message:
    """With each text of a message changed: its content, its name, and those in its calls."""
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
    return PalestraError(
        f"the chat template cannot be extended message by message: {reason}. Train with a template that only "
        "appends (ChatML templates do): set tokenizer.chat_template."
    )
