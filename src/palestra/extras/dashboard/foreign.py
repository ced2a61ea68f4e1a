"""Runs that other tools made: TRL's completions, verifiers' results, ATIF trajectories, the Tinker cookbook's logs.

`_FORMATS` lists the known files. Each file is read as lines of rollouts.jsonl and written into a run folder in the
cache, so that everything that reads run folders reads foreign runs, too.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from palestra.core.errors import InputError, PalestraError, needs_extra
from palestra.core.files import append_jsonl, cache_folder, read_jsonl, write_json
from palestra.core.group_codec import rollout_from_dict
from palestra.core.messages import from_dict
from palestra.core.run_folder import RunFolder
from palestra.evals.rollout_stats import rollout_stats
from palestra.extras.dashboard.catalog import ImportedRun

Row = dict[str, Any]  # a line of rollouts.jsonl
Node = Mapping[str, Any]  # an element of a logtree: tag, children, sometimes data

# Statistics that need tokens, turns and tool results, which foreign files do not have.
_NEED_TOKENS = set(
    "completion_length_mean completion_length_max conversation_length_max sampled_tokens turns_mean context_full_rate "
    "looping_rate tools_offered tool_error_rate unknown_tool_rate".split()
)
_NO_SCORE = {"step", "prompt", "completion", "advantage", "mode", "image", "images"}  # columns of TRL's files
_SUMMARIES = "_rollout_summaries.jsonl"


@dataclass(frozen=True, slots=True)
class _Format:
    source: str
    pattern: str  # of its files, below the path
    read: Callable[[Path, int], Iterator[Row]]  # takes a file and its number; `evaluation` marks evaluation rollouts


def open_foreign(path: Path) -> ImportedRun | None:
    """Convert the foreign run at a path; None if no known file is there."""
    for known in _FORMATS:
        if _files(known, path):
            name = hashlib.blake2b(str(path.resolve()).encode(), digest_size=8).hexdigest()
            folder = RunFolder(cache_folder() / "dashboard" / "imports" / f"{path.resolve().name}-{name}")
            _convert(known, path, folder)
            return ImportedRun(folder, known.source, partial(_convert, known, path, folder))
    return None


def _files(known: _Format, path: Path) -> list[Path]:
    if path.is_file():
        return [path] if path.match(known.pattern) else []
    return sorted(path.rglob(known.pattern))


def _convert(known: _Format, path: Path, folder: RunFolder) -> None:
    """Write the run folder, unless it exists and the foreign files have not changed."""
    files = _files(known, path)
    stamp = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files]
    with suppress(OSError, PalestraError):
        if folder.record.get("stamp") == stamp:
            return
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.rollouts_file.unlink(missing_ok=True)
    folder.metrics_file.unlink(missing_ok=True)
    shutil.rmtree(folder.evals, ignore_errors=True)
    rows = (row for number, file in enumerate(files) for row in known.read(file, number))
    metrics = _own_metrics(path)
    for (step, evaluation), members in groupby(rows, lambda row: (row["step"], row.pop("evaluation", None))):
        group = list(members)
        if evaluation is None:
            append_jsonl(folder.rollouts_file, group)
            append_jsonl(folder.metrics_file, [{"step": step, **metrics.get(step, {}), **_stats(group)}])
        else:
            folder.evals.mkdir(exist_ok=True)
            append_jsonl(folder.eval_file(evaluation), group)
    if not folder.rollouts_file.is_file():
        raise InputError(f"{path} looks like a run of {known.source} but holds no readable rollout")
    created = time.strftime("%Y%m%d-%H%M%S", time.localtime(max(file.stat().st_mtime for file in files)))
    about = {"format": 1, "name": path.resolve().name, "created": created, "agent": known.source, "stamp": stamp}
    write_json(folder.record_file, about)


def _stats(rows: list[Row]) -> dict[str, float]:
    """The metrics of a step that can be computed without tokens."""
    stats = rollout_stats([rollout_from_dict(row) for row in rows])
    calls = sum(len(message["tool_calls"]) for row in rows for message in row["messages"])
    rewards: dict[tuple[Any, str], list[float]] = {}
    for row in rows:
        rewards.setdefault((row["group"], row["problem_id"]), []).append(row["reward"])
    own = {"tool_calls_mean": calls / len(rows)}
    if groups := [group for group in rewards.values() if len(group) > 1]:
        own["equal_reward_groups"] = sum(len(set(group)) == 1 for group in groups) / len(groups)
    return {name: stats[name] for name in stats if name not in _NEED_TOKENS} | own


def _own_metrics(path: Path) -> dict[int, dict[str, float]]:
    """The metrics of each step that the cookbook wrote itself."""
    metrics: dict[int, dict[str, float]] = {}
    for row in read_jsonl(path / "metrics.jsonl") if path.is_dir() else ():
        numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
        metrics.setdefault(int(numbers.pop("step", 0)), {}).update(numbers)
    return metrics


# Rows and messages


def _row(
    step: int,
    group: int | None,
    problem: str,
    messages: list[Row],
    reward: float,
    scores: Mapping[str, float],
    **more: Any,
) -> Row:
    """A rollout without tokens; it passed if its reward is 1 or more."""
    row: Row = {"step": step, "group": group, "problem_id": problem, "messages": messages, "reward": reward}
    row |= {"passed": reward >= 1.0, "stop": "answered", "error": None, "seconds": 0.0, "tool_seconds": 0.0}
    row |= {"turns": [], "tool_names": [], "tool_results": []}
    verdicts = {name: {"value": value, "passed": None, "reason": "", "error": False} for name, value in scores.items()}
    own = {"reward": {"value": reward, "passed": reward >= 1.0, "reason": "", "error": False}}
    return row | {"scores": verdicts or own} | more


def _message(
    role: str, text: str, calls: list[Row] | None = None, call_id: str | None = None, name: str | None = None
) -> Row:
    return {"role": role, "text": text, "tool_calls": calls or [], "tool_call_id": call_id, "name": name}


def _messages(conversation: Any, role: str) -> list[Row]:
    """A text, or messages in OpenAI's form, as our messages."""
    if isinstance(conversation, str) or conversation is None:
        return [_message(role, str(conversation or ""))]
    rows = []
    for entry in conversation:
        try:
            message = from_dict({**entry, "tool_calls": [_openai_call(call) for call in entry.get("tool_calls") or ()]})
        except (PalestraError, TypeError, AttributeError, KeyError, ValueError):
            rows.append(_message(role, _text(entry)))
            continue
        calls = [{"id": c.id, "name": c.name, "arguments": c.arguments, "error": c.error} for c in message.tool_calls]
        rows.append(_message(message.role, message.text, calls, message.tool_call_id, message.name))
    return rows


def _dialogue(record: Row) -> list[Row]:
    return [*_messages(record.get("prompt"), "user"), *_messages(record.get("completion"), "assistant")]


def _openai_call(call: Any) -> Any:
    """Verifiers writes calls as JSON text, and without OpenAI's `function` around name and arguments."""
    call = json.loads(call) if isinstance(call, str) else call
    return call if "function" in call else {"id": call.get("id"), "type": "function", "function": call}


def _with_thinking(text: str, thought: Any) -> str:
    return f"<think>{thought}</think>\n{text}" if thought else text


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _number(value: Any) -> float:
    return _numbers({"": value}).get("", 0.0)


def _numbers(record: Any) -> dict[str, float]:
    """The finite numbers of a mapping; reward functions write NaN where they do not apply."""
    items = record.items() if isinstance(record, Mapping) else ()
    return {name: float(value) for name, value in items if isinstance(value, int | float) and math.isfinite(value)}


# TRL, verifiers and ATIF


def _trl_rows(file: Path, number: int) -> Iterator[Row]:
    """completions_00010.parquet: step, prompt, completion, a column for each reward function, advantage.

    The reward is their sum: the file does not hold the weights.
    """
    with needs_extra("reading TRL's completions", "data"):
        import pyarrow.parquet as parquet
    group, last = -1, None
    for record in parquet.read_table(file).to_pylist():
        prompt = _text(record.get("prompt"))
        group, last = (group, last) if prompt == last else (group + 1, prompt)
        scores = {name: value for name, value in _numbers(record).items() if name not in _NO_SCORE}
        problem = hashlib.blake2b(prompt.encode("utf-8", "replace"), digest_size=4).hexdigest()
        more = {"advantage": record["advantage"]} if record.get("advantage") is not None else {}
        step = int(record.get("step") or number)
        yield _row(step, group, problem, _dialogue(record), sum(scores.values()), scores, **more)


def _verifiers_rows(file: Path, number: int) -> Iterator[Row]:
    """results.jsonl: a rollout a line, with prompt, completion, reward and metrics."""
    for record in sorted(read_jsonl(file), key=lambda row: _order(row.get("example_id"))):
        if "completion" not in record:
            continue
        error, timing = record.get("error"), record.get("timing")
        yield _row(
            number,
            None,
            str(record.get("example_id")),
            _dialogue(record),
            _number(record.get("reward")),
            _numbers(record.get("metrics")),
            stop="failed" if error else "truncated" if record.get("is_truncated") else "answered",
            error=_text(error) if error else None,
            seconds=_number(timing.get("total")) if isinstance(timing, Mapping) else 0.0,
        )


def _order(example: Any) -> tuple[bool, int, str]:
    """Sort key: numbers by size, other ids by text."""
    return not isinstance(example, int), example if isinstance(example, int) else 0, str(example)


def _trace_rows(file: Path, number: int) -> Iterator[Row]:
    """traces.jsonl of verifiers 1: an episode a line, with a tree of messages for each agent."""
    for episode in sorted(read_jsonl(file), key=lambda row: _order(_task(row))):
        work = (episode.get("run") or {}).get("work") or {}
        for trace in episode.get("traces") or ():
            rewards = {name: reward for name, reward in (trace.get("rewards") or {}).items() if reward}
            errors = [_text(error.get("message")) for error in (*trace.get("errors", ()), *episode.get("errors", ()))]
            cut_off = (trace.get("calls") or [{}])[-1].get("finish_reason") == "length"
            agent = (trace.get("timing") or {}).get("agent") or {}
            yield _row(
                int(work.get("step") or number),
                None,
                str(_task(episode)),
                _last_path(trace.get("nodes") or []),
                sum(_number(r.get("score")) * _number(r.get("weight", 1.0)) for r in rewards.values()),
                {name: _number(r.get("score")) for name, r in rewards.items()} | _numbers(trace.get("metrics")),
                stop="failed" if errors else "truncated" if cut_off else "answered",
                error=errors[0] if errors else None,
                seconds=max(0.0, _number(agent.get("end")) - _number(agent.get("start"))),
            )


def _task(episode: Row) -> Any:
    task = episode.get("task") or {}
    return (task.get("data") or {}).get("idx", task.get("key"))


def _last_path(nodes: list[Row]) -> list[Row]:
    """The messages from the root to the last sampled one; other branches are histories that were rewritten."""
    path = list[Row]()
    at = next((i for i in reversed(range(len(nodes))) if nodes[i].get("sampled")), len(nodes) - 1)
    while at is not None and at >= 0:
        message = nodes[at].get("message") or {}
        thought = message.get("reasoning_content")
        path.append(
            {**message, "content": _with_thinking(message.get("content") or "", thought)} if thought else message
        )
        at = nodes[at].get("parent")  # type: ignore[assignment]
    return _messages(path[::-1], "assistant")


def _atif_rows(file: Path, number: int) -> Iterator[Row]:
    """A trajectory of Harbor: steps of system, user and agent, with tool calls and observations."""
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
        text = _with_thinking(_text(step.get("message") or ""), step.get("reasoning_content"))
        messages.append(_message(role, text, calls))
        for result in (step.get("observation") or {}).get("results") or ():
            messages.append(_message("tool", _text(result.get("content") or ""), call_id=result.get("source_call_id")))
    reward, problem = _harbor_result(file)
    yield _row(0, number, problem or str(record.get("session_id") or file.parent.name), messages, reward, {})


def _harbor_result(file: Path) -> tuple[float, str | None]:
    """The reward and the task of a trial, from the files next to its trajectory."""
    for folder in (file.parent, file.parent.parent):
        with suppress(OSError, ValueError, AttributeError):
            result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
            rewards = (result.get("verifier_result") or {}).get("rewards") or {}
            return _number(rewards.get("reward")), result.get("task_name")
        with suppress(OSError, ValueError):
            return float((folder / "verifier" / "reward.txt").read_text()), None
    return 0.0, None


# The Tinker cookbook: `…_rollout_summaries.jsonl` has a line for each trajectory, without text. `…_logtree.json` beside
# it is the tree of an HTML page with the first groups of the iteration: for each attempt its prompt, the answer and a
# table with its reward, in the order in which they ended, then a table for each trajectory, in the summaries' order.
# So groups are matched by their rewards, and attempts with equal rewards cannot be told apart.


@dataclass(frozen=True, slots=True)
class _ShownGroup:
    attempts: list[tuple[list[Row], str | None]]  # messages, and the reward as the page prints it
    returns: list[str]  # of the trajectories, in their order


def _cookbook_rows(file: Path, number: int) -> Iterator[Row]:
    """The rollouts of one iteration, of its training or of an evaluation."""
    shown = _shown_groups(file.with_name(file.name.removesuffix(_SUMMARIES) + "_logtree.json"))
    for _, members in groupby(read_jsonl(file), lambda record: record.get("group_idx")):
        records = list(members)
        for record, conversation in zip(records, _conversations(records, shown), strict=True):
            yield _cookbook_row(record, conversation)


def _cookbook_row(record: Row, conversation: list[Row] | None) -> Row:
    steps = [step for step in record.get("steps") or () if isinstance(step, Mapping)]
    group, iteration = int(record.get("group_idx") or 0), int(record.get("iteration") or 0)
    metrics: dict[str, Any] = {}
    for part in (*(step.get("metrics") or {} for step in steps), record.get("trajectory_metrics") or {}):
        metrics |= part
    scores = _numbers(metrics)
    messages = conversation or _without_text(record, steps)
    asked = [m["text"] for m in messages if m["role"] == "user"]
    question = asked[-1] if asked else ""  # those before it are examples
    problem = question[:80] if conversation and question else f"{iteration}/{group}"
    row = _row(iteration, group, problem, messages, _number(record.get("total_reward")), scores, question=question)
    if "correct" in scores:  # the verdict of its recipes; the reward includes a penalty for the format
        row["passed"] = scores["correct"] >= 1.0
    return row if record.get("split", "train") == "train" else row | {"evaluation": iteration}


def _without_text(record: Row, steps: list[Node]) -> list[Row]:
    opening = f"group {record.get('group_idx')}, {', '.join(map(str, record.get('tags') or []))}"
    messages = [_message("user", opening)]
    for step in steps:
        text = "\n".join(f"{name}: {_text(value)}" for name, value in (step.get("logs") or {}).items())
        messages.append(_message("assistant", text or f"{step.get('ac_len')} tokens (the log has no text)"))
    return messages


def _conversations(records: list[Row], shown: list[_ShownGroup]) -> list[list[Row] | None]:
    """The conversation of each trajectory of a group; the group is removed from `shown`."""
    returns = [f"{_number(record.get('total_reward')):.3f}" for record in records]
    group = next((group for group in shown if group.returns == returns), None)
    if group is None:
        return [None] * len(records)
    shown.remove(group)
    left, conversations = list(group.attempts), list[list[Row] | None]()
    for record in records:
        own = f"{sum(_number(step.get('reward')) for step in record.get('steps') or ()):.3f}"
        attempt = next((each for each in left if each[1] in (own, None)), None)
        if attempt is not None:
            left.remove(attempt)
        conversations.append(attempt[0] if attempt else None)
    return conversations


def _shown_groups(file: Path) -> list[_ShownGroup]:
    """The groups that a page shows; none if there is no page, or its form is unknown."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        root = json.loads(file.read_bytes().decode("utf-8", "replace"))["root"]
        return [_shown_group(body) for title, body in _sections(root, nested=True) if title == "Group Rollout"]
    return []


def _shown_group(body: Node) -> _ShownGroup:
    group, messages = _ShownGroup([], []), list[Row]()
    for title, part in _sections(body):
        if title == "Trajectory Details":
            group.returns.extend(_table(trajectory)["total_return"] for _, trajectory in _sections(part))
            continue
        for node in (part, *_descendants(part)):
            data = node.get("data")
            if isinstance(data, Mapping) and data.get("type") == "conversation":
                messages += _messages(data.get("messages"), "assistant")
        if title == "Reward":
            group.attempts.append((messages, _table(part).get("reward")))
            messages = []
    return group


def _descendants(node: Node, *, nested: bool = True) -> Iterator[Node]:
    """All elements below an element; without `nested`, those within its sections are left out."""
    for child in node.get("children") or ():
        if isinstance(child, Mapping):
            yield child
            if nested or child.get("tag") != "section":
                yield from _descendants(child, nested=nested)


def _sections(node: Node, *, nested: bool = False) -> Iterator[tuple[str, Node]]:
    """The sections below an element with their titles."""
    for each in _descendants(node, nested=nested):
        if each.get("tag") == "section":
            yield "".join(map(str, each["children"][0]["children"])), each


def _table(node: Node) -> dict[str, str]:
    """The rows of two cells of all tables below an element; the last one wins."""
    rows = (each.get("children") or () for each in _descendants(node) if each.get("tag") == "tr")
    pairs = [["".join(map(str, cell["children"])) for cell in cells] for cells in rows if len(cells) == 2]
    return {key: value for key, value in pairs}


_FORMATS = (
    _Format("trl", "completions_*.parquet", _trl_rows),
    _Format("cookbook", f"*{_SUMMARIES.removeprefix('_')}", _cookbook_rows),
    _Format("verifiers", "results.jsonl", _verifiers_rows),
    _Format("verifiers", "traces.jsonl", _trace_rows),
    _Format("atif", "*trajectory*.json", _atif_rows),
)
