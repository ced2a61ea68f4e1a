"""Scored groups as JSON, without training: what an environment gives, for people and programs to look at."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from palestra.core.group_codec import group_to_dict
from palestra.core.messages import to_dict
from palestra.core.types import Group, Problem
from palestra.rollout.collect import OnRollout, require_one_good
from palestra.rollout.evaluate import CollectsGroups


async def process(
    collector: CollectsGroups,
    problems: Sequence[Problem],
    *,
    group_size: int,
    seed: int,
    at_once: int,
    on_rollout: OnRollout = lambda r: None,
) -> AsyncIterator[dict[str, Any]]:
    """The record of one group after the other; `at_once` problems are attempted together."""
    for start in range(0, len(problems), at_once):
        some = problems[start : start + at_once]
        keys = [f"process/{seed}/{problem.id}" for problem in some]
        groups = await collector.collect(some, group_size, keys, on_rollout)
        require_one_good(groups)
        for problem, group in zip(some, groups, strict=True):
            yield group_record(problem, group)


def group_record(problem: Problem, group: Group) -> dict[str, Any]:
    """The group's columns, and the problem. Tokens, masks and logprobs are empty for a chat endpoint."""
    text = problem.input if isinstance(problem.input, str) else [to_dict(m) for m in problem.input]
    return {"input": text, "expect": problem.expect} | group_to_dict(group)
