"""A rollout of a JSON-lines file as a row of the index: the columns to filter and sort by, and the text to search."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from palestra.core.text import as_text

_SHOWN = ("id", "kind", "step", "problem_id", "reward", "advantage", "stop", "error", "tokens", "sampled_tokens",
          "turns", "tool_calls", "seconds", "question", "answer")  # fmt: skip
_TEASER = 200  # characters of a question
_ANSWER = 400  # of an answer: its beginning and its end
_SEARCHED = 200_000  # characters of one rollout that can be found
_TOOLS = 50
_MAX_NUMBER = 10**300
_Exact = Annotated[int, Meta(gt=-(2**53), lt=2**53)]  # steps, groups and tokens: exact in JSON, SQLite and NumPy


class _Turn(Struct):
    maker: str = ""
    token_ids: list[_Exact] | None = None
    logprobs: list[float | None] | None = None
    policy_version: _Exact | None = None

    def __post_init__(self) -> None:
        if self.token_ids and not self.maker:
            raise ValueError("tokens without a maker")


class _Message(Struct):
    tool_calls: list[dict[str, Any]] | None = None


class _Conversation(Struct):
    messages: list[_Message] | None = None
    turns: list[_Turn] | None = None


class _Rollout(_Conversation):
    """The fields that the pages read, with the types that they can show. Other programs write such files, too."""

    step: _Exact | None = None
    group: _Exact | None = None
    reward: float | None = None
    seconds: float | None = None
    advantage: float | None = None
    lineages: list[_Conversation] | None = None


def parse(line: bytes) -> dict[str, Any] | None:
    """The object of a line, also if it is not valid UTF-8; None if it is not a rollout."""
    try:
        record = json.loads(line.decode("utf-8", "replace"))
        return record if msgspec.convert(record, _Rollout).messages is not None else None
    except (ValueError, RecursionError):
        return None


def columns_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a rollout, without its position in the file."""
    turns, messages = turns_of(record), messages_of(record)
    sampled = [len(turn.get("token_ids") or ()) for turn in turns if turn.get("maker") == "model"]
    calls = [str(call.get("name")) for message in messages for call in message["tool_calls"]]
    return {
        "problem_id": clean(record.get("problem_id")),
        "reward": _number(record.get("reward")),
        "passed": int(bool(record.get("passed"))),
        "stop": clean(record.get("stop")),
        "error": None if record.get("error") is None else clean(record["error"])[:_ANSWER],
        "seconds": _number(record.get("seconds")),
        "tokens": sum(len(turn.get("token_ids") or ()) for turn in turns),
        "sampled_tokens": sum(sampled),
        "turns": len(sampled) or sum(m["role"] == "assistant" for m in messages),
        "tool_calls": len(calls),
        "tools": clean(json.dumps(calls[:_TOOLS], ensure_ascii=False)),
        "scores": clean(json.dumps({name: _verdict(score) for name, score in scores_of(record).items()})),
        "question": teaser(next((m["text"] for m in messages if m["role"] == "user"), ""), _TEASER),
        "answer": teaser(next((m["text"] for m in reversed(messages) if m["role"] == "assistant"), "")),
    }


def shown(row: Any) -> dict[str, Any]:
    """A row of the index as the pages get it."""
    columns = {name: row[name] for name in _SHOWN} | {name: json.loads(row[name]) for name in ("tools", "scores")}
    return columns | {"group": row["group_id"], "passed": bool(row["passed"])}


def messages_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages, each with all its fields and of the right types, whatever the file holds."""
    messages = []
    for message in record.get("messages") or ():
        text = message.get("text", message.get("content"))
        messages.append(
            {
                "role": str(message.get("role") or "user"),
                "text": text if isinstance(text, str) else "" if text is None else json.dumps(text),
                "tool_calls": [dict(call) for call in message.get("tool_calls") or ()],
                "tool_call_id": message.get("tool_call_id"),
                "name": message.get("name"),
            }
        )
    return messages


def conversations_of(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rollout, then its other conversations: with subagents, or after the agent has changed its history."""
    return [record, *(record.get("lineages") or ())]


def turns_of(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The turns of a rollout, then those of its other conversations."""
    return [turn for part in conversations_of(record) for turn in part.get("turns") or ()]


def scores_of(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    scores = record.get("scores")
    return {name: s for name, s in scores.items() if isinstance(s, dict)} if isinstance(scores, Mapping) else {}


def search_text(record: Mapping[str, Any]) -> str:
    """All that was said, called and found wrong, to be searched."""
    return clean("\n".join(_pieces(record)))[:_SEARCHED]


def _pieces(record: Mapping[str, Any]) -> Iterator[str]:
    for message in [m for part in conversations_of(record) for m in messages_of(part)]:
        yield message["text"][:_SEARCHED]
        for call in message["tool_calls"]:
            yield f"{call.get('name')} {json.dumps(call.get('arguments'), ensure_ascii=False)[:_SEARCHED]}"
    yield from (str(score.get("reason") or "") for score in scores_of(record).values())
    yield str(record.get("error") or "")


def snippet(text: str, words: Sequence[str], around: int = 60) -> list[tuple[str, bool]]:
    """The text near the first word that matches: pieces, each with whether it matches."""
    low, lowered = text.lower(), [word.lower() for word in words]
    places = [(place, word) for word in lowered if word and (place := low.find(word)) >= 0]
    if not places:
        return [(text[: 2 * around], False)]
    place, word = min(places)
    begin, end = max(0, place - around), place + len(word) + around
    before = ("…" if begin else "") + text[begin:place]
    after = text[place + len(word) : end] + ("…" if end < len(text) else "")
    return [(before, False), (text[place : place + len(word)], True), (after, False)]


def teaser(text: str, most: int = _ANSWER) -> str:
    """A text on one line; the middle of a long one is left out."""
    line = " ".join(text[: 4 * most].split()) if len(text) <= 4 * most else ""
    if not line:
        line = " ".join(text[:most].split())[: most // 2] + " … " + " ".join(text[-most:].split())[-most // 2 :]
    return clean(line if len(line) <= most else f"{line[: most // 2]} … {line[-most // 2 :]}")


def clean(value: Any) -> str:
    """Text that SQLite and UTF-8 can hold: lone surrogates are replaced."""
    return as_text(value).replace("\0", "\ufffd")


def _verdict(score: Mapping[str, Any]) -> dict[str, Any]:
    passed = None if score.get("passed") is None else bool(score["passed"])
    return {"value": _number(score.get("value")), "passed": passed, "error": bool(score.get("error"))}


def _number(value: Any) -> float:
    is_number = isinstance(value, int | float) and abs(value) < _MAX_NUMBER
    return float(value) if is_number else 0.0
