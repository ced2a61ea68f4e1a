"""One rollout with all its messages or its tokens, and a group side by side. And pages of them without script."""

from __future__ import annotations

import math
import os
import re
import sqlite3
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from palestra.core.errors import InputError, PalestraError
from palestra.core.run_folder import RunFolder
from palestra.core.types import Array
from palestra.evals.run_report.charts import curves_svg
from palestra.evals.run_report.write import fill_template
from palestra.extras.dashboard.rollout_index import RolloutIndex, UnknownRollout, token_table
from palestra.extras.dashboard.rollout_row import conversations_of, messages_of, scores_of, shown, turns_of

MAX_CHARS = 20_000  # of one message; the rest is read on request
_AFTER_DIVERGENCE = 80


def rollout(index: RolloutIndex, rollout_id: int, max_chars: int | None = MAX_CHARS) -> dict[str, Any]:
    """A rollout with its messages, verdicts and neighbours."""
    row = index.row(rollout_id)
    record = index.record(row)
    previous, following = (
        index.query(f"SELECT {end}(id) FROM rollouts WHERE +kind = ? AND id {sign} ?", row["kind"], rollout_id)[0][0]
        for end, sign in (("max", "<"), ("min", ">"))
    )
    siblings = index.query("SELECT id FROM rollouts WHERE group_id = ? ORDER BY id", row["group_id"])
    more = {"previous": previous, "next_id": following, "siblings": [sibling[0] for sibling in siblings]}
    return _full_record(row, record, max_chars) | more


def message_text(index: RolloutIndex, rollout_id: int, message: int, start: int, limit: int) -> dict[str, Any]:
    messages = messages_of(index.record(index.row(rollout_id)))
    if not 0 <= message < len(messages):
        raise UnknownRollout(f"rollout {rollout_id} has {len(messages)} messages, no number {message}")
    text = messages[message]["text"]
    return {"text": text[start : start + limit], "start": start, "chars": len(text)}


def group(index: RolloutIndex, group_id: int, max_chars: int | None = MAX_CHARS) -> dict[str, Any]:
    """The siblings of one problem, the best first, and where they part."""
    rows = index.query("SELECT * FROM rollouts WHERE group_id = ? ORDER BY id", group_id)
    if not rows:
        raise UnknownRollout(f"there is no group {group_id} in this run")
    rows.sort(key=lambda row: (row["advantage"] or 0.0, row["reward"]), reverse=True)
    records = [index.record(row) for row in rows]
    tokens = [[token for turn in turns_of(record) for token in turn.get("token_ids") or ()] for record in records]
    parts = first_difference(tokens)
    siblings = []
    for row, record, own in zip(rows, records, tokens, strict=True):
        at = parts if own is tokens[0] else first_difference([tokens[0], own])
        siblings.append(_full_record(row, record, max_chars) | _divergence(record, records[0], at))
    rewards = [row["reward"] for row in rows if row["error"] is None]
    turns = records[0].get("turns") or ()
    return {
        "id": group_id,
        **{name: rows[0][name] for name in ("kind", "step", "problem_id")},
        "equal": len(set(rewards)) <= 1,
        "prompt_tokens": len(turns[0].get("token_ids") or ()) if turns else 0,
        "diverges_at": parts,
        "rollouts": siblings,
    }


def first_difference(rows: Sequence[Sequence[Any]]) -> int | None:
    """The first place at which not all are alike; None if all are the same, or there is only one.

    >>> first_difference([[1, 2, 3], [1, 2, 4], [1, 2, 3]])
    2
    >>> first_difference([[1, 2], [1, 2, 3]])
    2
    """
    shortest = min(map(len, rows), default=0)
    for place in range(shortest):
        if any(row[place] != rows[0][place] for row in rows):
            return place
    return shortest if any(len(row) != shortest for row in rows) else None


def _divergence(record: Mapping[str, Any], best: Mapping[str, Any], at: int | None) -> dict[str, Any]:
    """The place where a rollout leaves the best one: the token, and the message and character that a reader sees."""
    divergence = {"diverges_at": at, "diverges_message": None, "diverges_char": None, "diverges_text": ""}
    others = _message_texts(best)
    for number, text in enumerate(_message_texts(record)):
        other = others[number] if number < len(others) else ""
        if text != other:
            place = first_difference([text, other]) or 0
            is_text = place < len(messages_of(record)[number]["text"])
            where = {"diverges_message": number, "diverges_char": place if is_text else None}
            return divergence | where | {"diverges_text": text[place : place + _AFTER_DIVERGENCE]}
    return divergence


def _message_texts(record: Mapping[str, Any]) -> list[str]:
    """Each message as text, with its calls after it."""
    return [
        message["text"] + "".join(f"{call.get('name')}({call.get('arguments')})" for call in message["tool_calls"])
        for message in messages_of(record)
    ]


def _full_record(row: sqlite3.Row, record: Mapping[str, Any], max_chars: int | None) -> dict[str, Any]:
    others = [
        {"stop": part.get("stop"), "messages": _messages(part, max_chars)} for part in conversations_of(record)[1:]
    ]
    return {
        **shown(row),
        "messages": _messages(record, max_chars),
        "lineages": others,
        "scores": {
            name: {
                "value": score.get("value"),
                "passed": score.get("passed"),
                "reason": str(score.get("reason") or "")[:max_chars],
                "error": bool(score.get("error")),
            }
            for name, score in scores_of(record).items()
        },
        "tool_results": record.get("tool_results") or [],
        "tool_names": record.get("tool_names") or [],
        "tool_seconds": record.get("tool_seconds"),
        "error": record.get("error"),
        "has_tokens": bool(row["tokens"]),
    }


def _messages(record: Mapping[str, Any], max_chars: int | None) -> list[dict[str, Any]]:
    """The messages of a conversation and the arguments of calls, cut; messages of tools with their `result`."""
    messages, results = messages_of(record), _results_by_id(record)
    for message in messages:
        same_id = results.get(str(message["tool_call_id"])) if message["role"] == "tool" else None
        message["result"] = same_id.popleft() if same_id else None
        text = message["text"]
        message["chars"], message["cut"] = len(text), max_chars is not None and len(text) > max_chars
        message["text"] = text[:max_chars]
        keys = ("id", "name", "arguments", "error")
        message["tool_calls"] = [{key: call.get(key) for key in keys} for call in message["tool_calls"]]
        for call in message["tool_calls"]:
            if max_chars is not None and len(arguments := str(call["arguments"])) > max_chars:
                call["arguments"] = arguments[:max_chars] + " …"
    return messages


def _results_by_id(record: Mapping[str, Any]) -> dict[str, deque[dict[str, Any]]]:
    """Tool results by call id, oldest first: many models number the calls of each turn from 0, so ids repeat."""
    by_id: dict[str, deque[dict[str, Any]]] = {}
    results = record.get("tool_results")
    for result in results if isinstance(results, list) else ():
        if isinstance(result, Mapping) and isinstance(result.get("id"), str):
            outcome = {"ok": bool(result.get("ok")), "seconds": result.get("seconds")}
            by_id.setdefault(result["id"], deque()).append(outcome)
    return by_id


def require_id(text: str) -> int:
    if not text.isdecimal() or len(text) > 18:
        raise InputError(f"{text[:40]!r} is not the number of a rollout")
    return int(text)


MAX_TOKENS = 20_000  # of one answer
_NUMBERS = ("logprob", "learner_logprob", "advantage", "ratio", "entropy", "gap")
# which token is the worst by each column: the one with the largest value of this
_BADNESS: Mapping[str, Callable[[Array], Array]] = {
    "gap": np.abs,
    "ratio": lambda ratio: np.abs(np.log(np.maximum(ratio, 1e-30))),
    "logprob": lambda logprob: -logprob,
    "entropy": lambda entropy: entropy,
}


def tokens(index: RolloutIndex, rollout_id: int, start: int, limit: int) -> dict[str, Any]:
    """The answer to `GET …/tokens`: a slice of the columns; worst tokens and ranges cover the whole rollout."""
    row = index.row(rollout_id)
    table = token_table(index.folder, row["step"]) if row["kind"] == "train" else None
    # the rollout's part of its step's token file is mapped, so that only its pages are read
    learned = None if table is None else table[row["token_start"] : row["token_start"] + row["tokens"]]
    columns = token_columns(index.record(row), learned)
    total, part = len(columns["ids"]), slice(start, start + min(limit, MAX_TOKENS))
    known = [name for name in _NUMBERS if not np.isnan(columns[name]).all()]
    decode = token_texts(index.folder)
    ids = columns["ids"][part].tolist()
    return {
        "total": total,
        "start": start,
        "ids": ids,
        "text": [decode(token) for token in ids],
        "maker": columns["maker"][part],
        "turn": columns["turn"][part].tolist(),
        "mask": columns["mask"][part].tolist(),
        "version": columns["version"][part].tolist(),
        **{name: [None if math.isnan(value) else value for value in columns[name][part].tolist()] for name in _NUMBERS},
        "known": known,
        "worst": {name: worst for name in known if name in _BADNESS and (worst := _worst(name, columns[name]))},
        "range": {name: [float(np.nanmin(columns[name])), float(np.nanmax(columns[name]))] for name in known},
    }


def token_columns(record: Mapping[str, Any], learned: Any = None) -> dict[str, Any]:
    """The columns of a rollout's line and of its token file, if any; NaN for missing values."""
    turns = [turn for turn in turns_of(record) if turn.get("token_ids")]
    lengths = [len(turn["token_ids"]) for turn in turns]
    total = sum(lengths)
    maker = [turn["maker"] for turn, length in zip(turns, lengths, strict=True) for _ in range(length)]
    logprob = _concatenated([_logprobs(turn) for turn in turns])
    columns: dict[str, Any] = {
        "ids": _concatenated([np.asarray(turn["token_ids"], dtype=np.int64) for turn in turns]),
        "maker": maker,
        "turn": np.repeat(np.cumsum([turn["maker"] == "model" for turn in turns]), lengths),  # 0: the prompt
        "version": np.repeat([int(turn.get("policy_version") or 0) for turn in turns], lengths),
        "mask": np.array([name == "model" for name in maker], dtype=bool),
        **dict.fromkeys(_NUMBERS, np.full(total, np.nan)),
        "logprob": logprob,
    }
    if learned is None or len(learned) != total:
        return columns
    numbers = {name: learned[name].astype(np.float64) for name in _NUMBERS if name != "gap"}
    exact = numbers["logprob"]
    numbers |= {"logprob": np.where(np.isnan(exact), logprob, exact), "gap": exact - numbers["learner_logprob"]}
    return columns | numbers | {"mask": np.asarray(learned["policy_mask"])}


def _logprobs(turn: Mapping[str, Any]) -> Array:
    known = turn.get("logprobs")
    if turn["maker"] != "model" or not known or len(known) != len(turn["token_ids"]):
        return np.full(len(turn["token_ids"]), np.nan)
    return np.array([math.nan if value is None else value for value in known], dtype=np.float64)


def _concatenated(parts: Sequence[Array]) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0)


def _worst(name: str, values: Array) -> dict[str, Any] | None:
    bad = np.where(np.isnan(values), -np.inf, _BADNESS[name](values))
    place = int(bad.argmax())
    return {"index": place, "value": float(values[place])} if np.isfinite(bad[place]) else None


def token_texts(folder: RunFolder) -> Callable[[int], str]:
    """Function from token id to text, by the run's tokenizer; "#17" if there is none."""
    import palestra.models

    last = folder.last_checkpoint()
    folders = [folder.model, *([last] if last else []), folder.tokenizer]
    with suppress(PalestraError):  # a config that cannot be read names no model
        name = folder.config.model.name
        embedded = Path(palestra.models.__file__).parent / name.removeprefix("palestra/")
        folders.append(embedded if name.startswith("palestra/") else Path(os.path.expanduser(name)))
    for path in (path / "tokenizer.json" for path in folders):
        if os.path.isfile(path):  # False where Path.is_file raises: a name may be too long
            return _decoder(str(path), path.stat().st_mtime_ns)
    return lambda token: f"#{token}"


@lru_cache(maxsize=4)
def _decoder(path: str, changed: int) -> Callable[[int], str]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)

    @lru_cache(maxsize=1 << 16)
    def decode(token: int) -> str:
        text = str(tokenizer.decode([token], skip_special_tokens=False))
        piece = tokenizer.id_to_token(token)
        # part of a character, which only its neighbours complete
        return f"#{token}" if piece is None else piece if "\ufffd" in text or not text else text

    return decode


MAX_GROUPS = 50  # of the page of a run, unless asked otherwise
_TEMPLATE = Path(__file__).with_name("export_page.html")
# control characters, marks of direction and characters of no width: they change what is seen without being seen
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)


def record_page(kind: str, run: str, record: Mapping[str, Any]) -> str:
    """The page of a rollout or a group, by its `kind`."""
    return _page(f"{kind} {record['id']} of {run}", [{"rollouts": [record], **record}])


def page_of_run(folder: RunFolder, groups: int | None = None) -> str:
    """The evaluation, the curves, and up to `groups` groups from all of training, with signal where possible."""
    index = RolloutIndex(folder)
    index.update()
    # One group out of each of `count` equal parts: the first whose rewards differ, since GRPO learned from it.
    rows = index.query(
        "SELECT group_id, min(reward) < max(reward) FROM rollouts WHERE kind = 'train' GROUP BY group_id ORDER BY 1"
    )
    count = min(MAX_GROUPS if groups is None else groups, len(rows))
    parts = (rows[i * len(rows) // count : (i + 1) * len(rows) // count] for i in range(count))
    shown = [group(index, max(part, key=lambda row: row[1])[0]) for part in parts]
    report = folder.report() or {}
    steps = folder.metrics()
    curves = {name: [(row["step"], row[name]) for row in steps if name in row] for name in ("reward_mean", "pass_rate")}
    charts = [curves_svg({name: line}, name, percent=name == "pass_rate") for name, line in curves.items() if line]
    changes = [row for row in report.get("changes") or () if {"name", "before", "after"} <= set(row)]
    changes = changes if len(changes) > 2 else changes[:1]  # with a single measure, "all measures" is the same again
    findings = [row for row in report.get("findings") or () if "sentence" in row]
    about = {"steps": len(steps), "total": len(rows), "changes": changes, "findings": findings, "charts": charts}
    return _page(folder.path.name, shown, about)


def reveal(text: Any) -> str:
    """Text in which hidden characters are written out.

    >>> reveal("a\\u202eb")
    'a\\\\u202eb'
    """
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", str(text))


def _page(title: str, groups: Sequence[Mapping[str, Any]], about: Mapping[str, Any] | None = None) -> str:
    from markupsafe import Markup

    if about is not None:
        about = {**about, "charts": [Markup(chart) for chart in about["charts"]]}  # made here, its texts escaped
    return fill_template(_TEMPLATE, {"reveal": reveal}, {"title": title, "groups": groups, "about": about})
