"""For those who continue with TRL: measures as its reward functions, suites as its datasets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from palestra.core.errors import PalestraError, needs_extra
from palestra.core.event_loop import outside_event_loop
from palestra.core.messages import as_messages, to_dict
from palestra.core.types import Message, Problem
from palestra.evals.measures import Measure, MeasureContext, as_measure, run_group_measure
from palestra.evals.suite import EvalSuite

RewardFunction = Callable[..., list[float | None]]
_TIMEOUT_S = 300.0


def measure_to_reward(measure: Any) -> RewardFunction:
    """A measure (or its name, or a reward model) as a reward function for TRL's trainer.

    `ctx.expect` and `ctx.case` come from the columns that `eval_suite_to_hf_dataset` writes. Where the measure raises,
    the reward is None, which TRL leaves out.
    """
    scored: Measure = as_measure(measure)

    def reward(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        names = [name for name, values in columns.items() if isinstance(values, list) and len(values) == len(prompts)]
        rows = [{name: columns[name][i] for name in names} for i in range(len(prompts))]
        contexts = [_context(p, c, row) for p, c, row in zip(prompts, completions, rows, strict=True)]

        async def score() -> list[Any]:
            groups: dict[str, list[int]] = {}  # completions of one prompt, which a measure may compare
            for i, prompt in enumerate(prompts):
                groups.setdefault(repr(prompt), []).append(i)
            calls = (run_group_measure(scored, [contexts[i] for i in g], _TIMEOUT_S) for g in groups.values())
            found = dict(zip(chain(*groups.values()), chain(*await asyncio.gather(*calls)), strict=True))
            return [found[i] for i in range(len(contexts))]

        return [None if s.error else s.value for s in outside_event_loop(lambda: asyncio.run(score()))]

    reward.__name__ = scored.name
    return reward


def combine_rewards(functions: Sequence[RewardFunction], weights: Sequence[float] | None = None) -> RewardFunction:
    """One reward function: the weighted sum of several; None where none of them applies."""
    factors = [1.0] * len(functions) if weights is None else list(weights)
    if len(factors) != len(functions):
        raise PalestraError(f"{len(factors)} weights for {len(functions)} reward functions; give one each")

    def combined(**columns: Any) -> list[float | None]:
        rows = zip(*(function(**columns) for function in functions), strict=True)
        return [_weighted_sum(values, factors) for values in rows]

    return combined


def eval_suite_to_hf_dataset(suite: EvalSuite, instructions: str | None = None) -> Any:
    """The cases as a dataset for TRL: `prompt` (messages), `expect`, `case_id`, and the records' columns."""
    with needs_extra("eval_suite_to_hf_dataset", "data"):
        from datasets import Dataset
    opening = [Message("system", instructions)] if instructions else []
    rows = [
        dict(case.row)
        | {
            "prompt": [to_dict(message) for message in (*opening, *as_messages(case.input))],
            "expect": case.expect,
            "case_id": case.id,
        }
        for case in suite
    ]
    return Dataset.from_list(rows)


def _context(prompt: Any, completion: Any, row: dict[str, Any]) -> MeasureContext:
    said = [Message("assistant", completion)] if isinstance(completion, str) else as_messages(completion)
    case = Problem(str(row.get("case_id", "")), as_messages(prompt), row.get("expect"), row)
    return MeasureContext((*as_messages(prompt), *said), (), case.expect, case)


def _weighted_sum(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    counted = [value * weight for value, weight in zip(values, weights, strict=True) if value is not None]
    return sum(counted) if counted else None
