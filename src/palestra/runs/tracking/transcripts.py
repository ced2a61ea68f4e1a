"""Rollouts of a step as a table for services that show tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from palestra.core.messages import prompt_length
from palestra.core.show import show_call, visible
from palestra.core.types import Group, Message, Rollout

COLUMNS = ["step", "problem", "reward", "passed", "stop", "sampled_tokens", "question", "transcript", "reasons"]
MAX_ROWS = 32
MAX_CHARS = 10_000  # of one cell


def transcript_rows(step: int, groups: Sequence[Group]) -> list[list[Any]]:
    """The first rollouts of a step, whole groups together, best reward first in each."""
    ordered = (r for group in groups for r in sorted(group.rollouts, key=lambda r: r.reward, reverse=True))
    return [_row(step, rollout) for rollout in islice(ordered, MAX_ROWS)]


def _row(step: int, rollout: Rollout) -> list[Any]:
    first = prompt_length(rollout.messages)
    question = next((message.text for message in reversed(rollout.messages[:first]) if message.role == "user"), "")
    said = rollout.messages[first:]
    reasons = [f"{name}: {score.value:g} {score.reason}".strip() for name, score in rollout.scores.items()]
    texts = (question, "\n".join(_line(message) for message in said), "\n".join(reasons) or rollout.error or "")
    numbers: list[Any] = [
        step,
        rollout.problem_id,
        float(rollout.reward),
        rollout.passed,
        rollout.stop,
        rollout.sampled_tokens,
    ]
    return [*numbers, *(visible(text)[:MAX_CHARS] for text in texts)]


def _line(message: Message) -> str:
    calls = "".join(f"\n  calls {show_call(call)}" for call in message.tool_calls)
    return f"{message.role}: {message.text}{calls}"
