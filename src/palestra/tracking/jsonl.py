"""The tracker that is always on: metrics.jsonl, rollouts.jsonl and evals/ in the run folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from palestra.core.files import append_jsonl, filter_jsonl, write_jsonl
from palestra.core.run_folder import EvalName, RunFolder
from palestra.core.types import Group, Message, Rollout

_MESSAGE_FIELDS = tuple(field.name for field in fields(Message))


class JsonlTracker:
    """One line per step in metrics.jsonl, one line per rollout in rollouts.jsonl."""

    def __init__(self, folder: RunFolder, resume_after: int | None = None) -> None:
        self._folder = folder
        if resume_after is not None:  # the steps after it are repeated
            for path in (folder.metrics_file, folder.rollouts_file):
                filter_jsonl(path, lambda row: "step" in row and row["step"] <= resume_after)

    def metrics(self, step: int, row: Mapping[str, float]) -> None:
        append_jsonl(self._folder.metrics_file, [{"step": step, **row}])

    def rollouts(self, step: int, groups: Sequence[Group]) -> None:
        rows = ({"step": step, **rollout_record(r)} for group in groups for r in group.rollouts)
        append_jsonl(self._folder.rollouts_file, rows)

    def close(self) -> None:
        pass


def write_eval_rollouts(folder: RunFolder, name: EvalName, rollouts: Sequence[Rollout]) -> None:
    """Write the rollouts of one evaluation to evals/; running it again replaces them."""
    folder.evals.mkdir(exist_ok=True)
    write_jsonl(folder.eval_file(name), (rollout_record(rollout) for rollout in rollouts))


def rollout_record(rollout: Rollout) -> dict[str, Any]:
    """A rollout for JSON: its messages, the token ids of each turn with their maker, and its scores."""
    return {
        "problem_id": rollout.problem_id,
        "reward": rollout.reward,
        "passed": rollout.passed,
        "stop": rollout.stop,
        "error": rollout.error,
        "scores": {name: asdict(score) for name, score in rollout.scores.items()},
        "messages": [_message_record(m) for m in rollout.messages],
        "turns": [
            {"maker": t.maker, "token_ids": t.token_ids, "policy_version": t.policy_version} for t in rollout.turns
        ],
        "seconds": round(rollout.seconds, 4),
        "tool_seconds": round(rollout.tool_seconds, 4),
    }


def _message_record(message: Message) -> dict[str, Any]:
    """Like `asdict`, without its deep copies: a step has thousands of messages."""
    record = {field: getattr(message, field) for field in _MESSAGE_FIELDS}
    return record | {"tool_calls": [asdict(call) for call in message.tool_calls]}
