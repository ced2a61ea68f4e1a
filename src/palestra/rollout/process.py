"""Scored groups as plain data, without training: what an environment gives, for people and programs to look at."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict
from typing import Any

from palestra.chat.messages import to_dict
from palestra.core.types import Group, Problem, Rollout
from palestra.rollout.evaluate import Collects

UNTRAINED = -100  # in masks: a token that the model did not make


async def process(
    collector: Collects,
    problems: Sequence[Problem],
    *,
    group_size: int,
    seed: int,
    at_once: int,
    on_rollout: Callable[[Rollout], None] = lambda r: None,
) -> AsyncIterator[dict[str, Any]]:
    """The record of one group after the other; `at_once` problems are attempted together."""
    for start in range(0, len(problems), at_once):
        some = problems[start : start + at_once]
        groups = await collector.collect(some, group_size, f"process/{seed}", on_rollout)
        for problem, group in zip(some, groups, strict=True):
            yield group_record(problem, group)


def group_record(problem: Problem, group: Group) -> dict[str, Any]:
    """One group, a list entry for each sibling. Tokens, masks and logprobs are empty for a chat endpoint.

    `scores` are the rewards, `masks` the token ids that the model made and -100 elsewhere.
    """
    rollouts = group.rollouts
    return {
        "problem_id": problem.id,
        "input": problem.input if isinstance(problem.input, str) else [to_dict(m) for m in problem.input],
        "expect": problem.expect,
        "scores": [r.reward for r in rollouts],
        "passed": [r.passed for r in rollouts],
        "verdicts": [{name: asdict(score) for name, score in r.scores.items()} for r in rollouts],
        "messages": [[to_dict(m) for m in r.messages] for r in rollouts],
        "tokens": [[i for turn in r.turns for i in turn.token_ids] for r in rollouts],
        "masks": [
            [i if turn.maker == "model" else UNTRAINED for turn in r.turns for i in turn.token_ids] for r in rollouts
        ],
        "inference_logprobs": [
            [p for turn in r.turns for p in (turn.logprobs or (0.0,) * len(turn.token_ids))] for r in rollouts
        ],
        "stops": [r.stop for r in rollouts],
        "errors": [r.error for r in rollouts],
        "seconds": [round(r.seconds, 3) for r in rollouts],
    }
