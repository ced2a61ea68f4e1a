"""Rollouts of other trainers as lines of rollouts.jsonl: TRL's completions, verifiers' results, ATIF trajectories."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from palestra.core.errors import PalestraError, needs_extra
from palestra.core.files import read_jsonl
from palestra.core.messages import from_dict

Row = dict[str, Any]  # a line of rollouts.jsonl
_PROMPT_COLUMNS = {"step", "prompt", "completion", "advantage", "mode", "image", "images"}


def foreign_row(
    step: int, group: int | None, problem: str, messages: list[Row], reward: float, scores: Mapping[str, float]
) -> Row:
    """A rollout without tokens; its reward alone says whether it passed."""
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


def to_messages(conversation: Any, role: str) -> list[Row]:
    """A text, or messages in OpenAI's form, as our messages."""
    if isinstance(conversation, str) or conversation is None:
        return [message_row(role, str(conversation or ""))]
    found = []
    for entry in conversation:
        try:
            message = from_dict({**entry, "tool_calls": [_openai_call(call) for call in entry.get("tool_calls") or ()]})
        except (PalestraError, TypeError, AttributeError, KeyError, ValueError):
            found.append(message_row(role, as_text(entry)))
            continue
        calls = [{"id": c.id, "name": c.name, "arguments": c.arguments, "error": c.error} for c in message.tool_calls]
        found.append(message_row(message.role, message.text, calls, message.tool_call_id, message.name))
    return found


def _openai_call(call: Any) -> Any:
    """Verifiers writes calls as JSON in a text, and without OpenAI's `function` around name and arguments."""
    call = json.loads(call) if isinstance(call, str) else call
    return call if "function" in call else {"id": call.get("id"), "type": "function", "function": call}


def message_row(
    role: str, text: str, calls: list[Row] | None = None, call_id: str | None = None, name: str | None = None
) -> Row:
    return {"role": role, "text": text, "tool_calls": calls or [], "tool_call_id": call_id, "name": name}


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def as_number(value: Any) -> float:
    return next(iter(numbers_of({"": value}).values()), 0.0)


def numbers_of(record: Any) -> dict[str, float]:
    """The values of a mapping that are numbers; without NaN, which reward functions write where they do not apply."""
    found = record.items() if isinstance(record, Mapping) else ()
    return {name: float(value) for name, value in found if isinstance(value, int | float) and math.isfinite(value)}


def trl_rows(file: Path, number: int) -> Iterator[Row]:
    """completions_00010.parquet: step, prompt, completion, a column for each reward function, advantage.

    The reward is their sum: with which weights it was trained is not in the file.
    """
    with needs_extra("reading TRL's completions", "data"):
        import pyarrow.parquet as parquet
    group, last = -1, None
    for record in parquet.read_table(file).to_pylist():
        prompt = as_text(record.get("prompt"))
        group, last = (group, last) if prompt == last else (group + 1, prompt)
        scores = {name: value for name, value in numbers_of(record).items() if name not in _PROMPT_COLUMNS}
        problem = hashlib.blake2b(prompt.encode("utf-8", "replace"), digest_size=4).hexdigest()
        messages = [*to_messages(record.get("prompt"), "user"), *to_messages(record.get("completion"), "assistant")]
        row = foreign_row(int(record.get("step") or number), group, problem, messages, sum(scores.values()), scores)
        yield row | ({"advantage": record["advantage"]} if record.get("advantage") is not None else {})


def verifiers_rows(file: Path, number: int) -> Iterator[Row]:
    """results.jsonl: a rollout a line, with prompt, completion, reward and metrics."""
    for record in sorted(read_jsonl(file), key=lambda row: _order(row.get("example_id"))):
        if "completion" not in record:
            continue
        messages = [*to_messages(record.get("prompt"), "user"), *to_messages(record.get("completion"), "assistant")]
        example, reward = str(record.get("example_id")), as_number(record.get("reward"))
        row = foreign_row(number, None, example, messages, reward, numbers_of(record.get("metrics")))
        error, timing = record.get("error"), record.get("timing") or {}
        stop = "failed" if error else "truncated" if record.get("is_truncated") else "answered"
        seconds = as_number(timing.get("total")) if isinstance(timing, Mapping) else 0.0
        yield row | {"stop": stop, "error": None if not error else as_text(error), "seconds": seconds}


def _order(example: Any) -> tuple[bool, int, str]:
    """Numbers by their size, all else by its text."""
    return not isinstance(example, int), example if isinstance(example, int) else 0, str(example)


def trace_rows(file: Path, number: int) -> Iterator[Row]:
    """traces.jsonl of verifiers 1: an episode a line, in it the trace of each agent as a tree of messages."""
    for episode in sorted(read_jsonl(file), key=lambda row: _order(_task(row))):
        problem = str(_task(episode))
        work = (episode.get("run") or {}).get("work") or {}
        for trace in episode.get("traces") or ():
            rewards = {name: reward for name, reward in (trace.get("rewards") or {}).items() if reward}
            total = sum(as_number(r.get("score")) * as_number(r.get("weight", 1.0)) for r in rewards.values())
            scores = {name: as_number(r.get("score")) for name, r in rewards.items()} | numbers_of(trace.get("metrics"))
            row = foreign_row(int(work.get("step") or number), None, problem, _last_path(trace), total, scores)
            errors = [as_text(error.get("message")) for error in (*trace.get("errors", ()), *episode.get("errors", ()))]
            agent = (trace.get("timing") or {}).get("agent") or {}
            yield row | {
                "stop": "failed" if errors else "truncated" if _cut_off(trace) else "answered",
                "error": errors[0] if errors else None,
                "seconds": max(0.0, as_number(agent.get("end")) - as_number(agent.get("start"))),
            }


def _cut_off(trace: Row) -> bool:
    calls = trace.get("calls") or [{}]
    return bool(calls[-1].get("finish_reason") == "length")


def _task(episode: Row) -> Any:
    task = episode.get("task") or {}
    return (task.get("data") or {}).get("idx", task.get("key"))


def _last_path(trace: Row) -> list[Row]:
    """The messages from the root to what was said last; other branches are histories that were rewritten."""
    nodes, path = trace.get("nodes") or [], list[Any]()
    at = next((i for i in reversed(range(len(nodes))) if nodes[i].get("sampled")), len(nodes) - 1)
    while at is not None and at >= 0:
        path.append(nodes[at].get("message") or {})
        at = nodes[at].get("parent")
    return to_messages([_with_thinking(message) for message in reversed(path)], "assistant")


def _with_thinking(message: Row) -> Row:
    thought = message.get("reasoning_content")
    return {**message, "content": f"<think>{thought}</think>\n{message.get('content') or ''}"} if thought else message


def atif_rows(file: Path, number: int) -> Iterator[Row]:
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
        text = as_text(step.get("message") or "")
        messages.append(message_row(role, f"<think>{thought}</think>\n{text}" if thought else text, calls))
        for result in (step.get("observation") or {}).get("results") or ():
            messages.append(
                message_row("tool", as_text(result.get("content") or ""), call_id=result.get("source_call_id"))
            )
    reward, problem = _harbor_result(file)
    yield foreign_row(0, number, problem or str(record.get("session_id") or file.parent.name), messages, reward, {})


def _harbor_result(file: Path) -> tuple[float, str | None]:
    """The reward and the task of a trial, which lie beside its trajectory."""
    for folder in (file.parent, file.parent.parent):
        with suppress(OSError, ValueError, AttributeError):
            result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
            rewards = (result.get("verifier_result") or {}).get("rewards") or {}
            return as_number(rewards.get("reward")), result.get("task_name")
        with suppress(OSError, ValueError):
            return float((folder / "verifier" / "reward.txt").read_text()), None
    return 0.0, None
