"""Runs that others made: TRL's completions, verifiers' results, ATIF trajectories, the Tinker cookbook's logs.

Each is converted into a run folder of ours in the cache, so that everything that reads run folders reads them, too.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from palestra.core.errors import PalestraError
from palestra.core.files import append_jsonl, cache_folder, read_jsonl, write_json
from palestra.core.group_codec import rollout_from_dict
from palestra.core.messages import from_dict
from palestra.core.run_folder import RunFolder
from palestra.dashboard.catalog import Imported
from palestra.evals.rollout_stats import rollout_stats

Row = dict[str, Any]  # a line of rollouts.jsonl
_PROMPT_COLUMNS = {"step", "prompt", "completion", "advantage", "mode", "image", "images"}


@dataclass(frozen=True, slots=True)
class _Format:
    source: str
    patterns: tuple[str, ...]  # of its files, below the path
    read: Callable[[Path, int], Iterator[Row]]  # a file, and its place among them


def open_foreign(path: Path) -> Imported | None:
    """The foreign run at a path, converted; None where nothing is known there."""
    for known in _FORMATS:
        if _files(known, path):
            name = hashlib.blake2b(str(path.resolve()).encode(), digest_size=8).hexdigest()
            folder = RunFolder(cache_folder() / "dashboard" / "imports" / f"{path.resolve().name}-{name}")
            _convert(known, path, folder)
            return Imported(folder, known.source, partial(_convert, known, path, folder))
    return None


def _files(known: _Format, path: Path) -> list[Path]:
    if path.is_file():
        return [path] if any(path.match(pattern) for pattern in known.patterns) else []
    return sorted({found for pattern in known.patterns for found in path.rglob(pattern)})


def _convert(known: _Format, path: Path, folder: RunFolder) -> None:
    """Write the run folder, unless it is there and its files are as they were."""
    files = _files(known, path)
    stamp = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    with suppress(OSError, PalestraError):
        if folder.record.get("stamp") == stamp:
            return
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.rollouts_file.unlink(missing_ok=True)
    folder.metrics_file.unlink(missing_ok=True)
    rows = (row for number, file in enumerate(files) for row in known.read(file, number))
    for step, members in groupby(rows, lambda row: row["step"]):
        found = list(members)
        append_jsonl(folder.rollouts_file, found)
        stats = rollout_stats([rollout_from_dict(row) for row in found])
        append_jsonl(folder.metrics_file, [{"step": step, **_own_metrics(path, step), **stats}])
    if not folder.rollouts_file.is_file():
        raise PalestraError(f"{path} looks like a run of {known.source}, and holds no rollout that can be read")
    newest = max(file.stat().st_mtime for file in files)
    created = time.strftime("%Y%m%d-%H%M%S", time.localtime(newest))
    about = {"format": 1, "name": path.resolve().name, "created": created, "agent": known.source, "stamp": stamp}
    write_json(folder.record_file, about)


def _own_metrics(path: Path, step: int) -> Mapping[str, Any]:
    """The cookbook writes metrics of its own."""
    rows = read_jsonl(path / "metrics.jsonl") if path.is_dir() else iter(())
    found = next((row for row in rows if row.get("step") == step), {})
    return {name: value for name, value in found.items() if isinstance(value, int | float)}


def _row(step: int, group: int, problem: str, messages: list[Row], reward: float, scores: Mapping[str, float]) -> Row:
    verdicts = {name: {"value": value, "passed": None, "reason": "", "error": False} for name, value in scores.items()}
    return {
        "step": step,
        "group": group,
        "problem_id": problem,
        "reward": reward,
        "passed": reward >= 1.0,
        "stop": "answered",
        "error": None,
        "scores": verdicts or {"reward": {"value": reward, "passed": reward >= 1.0, "reason": "", "error": False}},
        "messages": messages,
        "turns": [],
        "tool_names": [],
        "tool_results": [],
        "seconds": 0.0,
        "tool_seconds": 0.0,
    }


def _messages(conversation: Any, role: str) -> list[Row]:
    """A text, or messages in OpenAI's form, as our messages."""
    if isinstance(conversation, str) or conversation is None:
        return [_message(role, str(conversation or ""))]
    found = []
    for entry in conversation:
        try:
            message = from_dict(entry)
        except (PalestraError, TypeError, AttributeError, KeyError):
            found.append(_message(role, _text(entry)))
            continue
        calls = [{"id": c.id, "name": c.name, "arguments": c.arguments, "error": c.error} for c in message.tool_calls]
        found.append(_message(message.role, message.text, calls, message.tool_call_id, message.name))
    return found


def _message(
    role: str, text: str, calls: list[Row] | None = None, call_id: str | None = None, name: str | None = None
) -> Row:
    return {"role": role, "text": text, "tool_calls": calls or [], "tool_call_id": call_id, "name": name}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _trl(file: Path, number: int) -> Iterator[Row]:
    """completions_00010.parquet: step, prompt, completion, a column for each reward function, advantage."""
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise PalestraError("TRL's completions are Parquet files; pip install 'palestra[data]'") from None
    group, last = -1, None
    for record in parquet.read_table(file).to_pylist():
        prompt = _text(record.get("prompt"))
        group, last = (group, last) if prompt == last else (group + 1, prompt)
        names = [n for n, v in record.items() if n not in _PROMPT_COLUMNS and isinstance(v, int | float)]
        scores = {name: float(record[name]) for name in names}
        problem = hashlib.blake2b(prompt.encode("utf-8", "replace"), digest_size=4).hexdigest()
        messages = [*_messages(record.get("prompt"), "user"), *_messages(record.get("completion"), "assistant")]
        row = _row(int(record.get("step") or number), group, problem, messages, sum(scores.values()), scores)
        yield row | ({"advantage": record["advantage"]} if record.get("advantage") is not None else {})


def _verifiers(file: Path, number: int) -> Iterator[Row]:
    """results.jsonl: a rollout a line, with prompt, completion, reward and metrics."""
    for record in sorted(read_jsonl(file), key=lambda row: str(row.get("example_id"))):
        if "completion" not in record:
            continue
        messages = [*_messages(record.get("prompt"), "user"), *_messages(record.get("completion"), "assistant")]
        metrics = record.get("metrics") if isinstance(record.get("metrics"), Mapping) else {}
        scores = {name: float(value) for name, value in (metrics or {}).items() if isinstance(value, int | float)}
        example, reward = str(record.get("example_id")), _number(record.get("reward"))
        row = _row(number, 0, example, messages, reward, scores)
        error = record.get("error")
        stop = "failed" if error else "truncated" if record.get("is_truncated") else "answered"
        yield row | {"group": None, "stop": stop, "error": None if not error else _text(error)}


def _atif(file: Path, number: int) -> Iterator[Row]:
    """A trajectory of Harbor: steps of system, user and agent, with tool calls and what was observed."""
    try:
        record = json.loads(file.read_bytes().decode("utf-8", "replace"))
    except ValueError:
        return
    if not isinstance(record, Mapping) or not str(record.get("schema_version", "")).startswith("ATIF"):
        return
    messages: list[Row] = []
    for step in record.get("steps") or ():
        role = {"agent": "assistant", "system": "system"}.get(str(step.get("source")), "user")
        calls = [
            {
                "id": c.get("tool_call_id"),
                "name": c.get("function_name"),
                "arguments": c.get("arguments"),
                "error": None,
            }
            for c in step.get("tool_calls") or ()
        ]
        thought = step.get("reasoning_content")
        text = _text(step.get("message") or "")
        messages.append(_message(role, f"<think>{thought}</think>\n{text}" if thought else text, calls))
        for result in (step.get("observation") or {}).get("results") or ():
            messages.append(_message("tool", _text(result.get("content") or ""), call_id=result.get("source_call_id")))
    reward, problem = _harbor_result(file)
    yield _row(0, number, problem or str(record.get("session_id") or file.parent.name), messages, reward, {})


def _harbor_result(file: Path) -> tuple[float, str | None]:
    """The reward and the task of a trial, which lie beside its trajectory."""
    for folder in (file.parent, file.parent.parent):
        with suppress(OSError, ValueError, AttributeError):
            result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
            rewards = (result.get("verifier_result") or {}).get("rewards") or {}
            return _number(rewards.get("reward")), result.get("task_name")
        with suppress(OSError, ValueError):
            return float((folder / "verifier" / "reward.txt").read_text()), None
    return 0.0, None


def _cookbook(file: Path, number: int) -> Iterator[Row]:
    """…_rollout_summaries.jsonl of one iteration: rewards, lengths and logs of each step, no tokens."""
    for record in read_jsonl(file):
        steps = [step for step in record.get("steps") or () if isinstance(step, Mapping)]
        messages = [
            _message("user", f"group {record.get('group_idx')}, {', '.join(map(str, record.get('tags') or []))}")
        ]
        for step in steps:
            logs = step.get("logs") or {}
            lines = [f"{name}: {_text(value)}" for name, value in logs.items()]
            lines = lines or [f"{step.get('ac_len')} tokens (the log has no text)"]
            messages.append(_message("assistant", "\n".join(lines)))
        metrics = record.get("trajectory_metrics") or {}
        scores = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        group, iteration = int(record.get("group_idx") or 0), int(record.get("iteration") or 0)
        yield _row(iteration, group, f"{iteration}/{group}", messages, _number(record.get("total_reward")), scores)


_FORMATS = (
    _Format("trl", ("completions_*.parquet",), _trl),
    _Format("cookbook", ("*rollout_summaries.jsonl",), _cookbook),
    _Format("verifiers", ("results.jsonl",), _verifiers),
    _Format("atif", ("*trajectory*.json",), _atif),
)
