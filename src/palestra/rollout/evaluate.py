"""Groups without training: a model's score on problems, and scored groups as JSON for people and programs."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from itertools import chain
from typing import Any, Protocol, runtime_checkable

from palestra.core.group_codec import group_to_dict
from palestra.core.messages import to_dict
from palestra.core.types import Group, Problem, without_routing
from palestra.evals.eval_file import EvalFile
from palestra.evals.report import EvalReport
from palestra.rollout.collect import OnRollout, require_one_good

ATTEMPTS_BETWEEN_WRITES = 64  # of an evaluation with a file; enough to keep a sampler busy


class GroupCollector(Protocol):
    """Collects groups for problems: attempts by a policy or an endpoint, or a user's function."""

    async def collect(
        self, problems: Sequence[Problem], group_size: int, seed_keys: Sequence[str], on_rollout: OnRollout = ...
    ) -> list[Group]: ...

    def groups_at_once(self, group_size: int) -> int:
        """Maximum number of groups in flight."""
        ...


@runtime_checkable
class SupportsPrefetch(Protocol):
    """A collector that can begin before the policy may be asked."""

    async def prepare(self, problems: Sequence[Problem], group_size: int) -> None:
        """Do the work that needs no policy for the next problems of `collect`."""
        ...

    def abandon(self) -> None:
        """Discard prepared groups that will not be collected."""
        ...


async def evaluate(
    collector: GroupCollector,
    problems: Sequence[Problem],
    *,
    samples_per_case: int = 1,
    seed: int = 0,
    on_rollout: OnRollout = lambda r: None,
    file: EvalFile | None = None,
) -> EvalReport:
    """Attempt every problem `samples_per_case` times and report pass rates with their intervals.

    With a file, attempts that it holds are not made again, and new ones are written to it as they end.
    """
    began = time.perf_counter()
    done = {} if file is None else file.load(problems, samples_per_case)
    for rollout in chain.from_iterable(done.values()):
        on_rollout(rollout)
    missing = [problem for problem in problems if problem.id not in done]
    at_once = len(missing) if file is None else max(1, ATTEMPTS_BETWEEN_WRITES // samples_per_case)
    for start in range(0, len(missing), max(1, at_once)):
        part = missing[start : start + at_once]
        keys = [f"eval/{seed}/{problem.own_id}" for problem in part]
        groups = await collector.collect(part, samples_per_case, keys, on_rollout)
        found = zip(part, groups, strict=True)
        done |= {problem.id: list(map(without_routing, group.rollouts)) for problem, group in found}
        if file is not None:
            file.add(groups)
        require_one_good(groups)
    rollouts = [rollout for problem in problems for rollout in done[problem.id]]
    return EvalReport.of(rollouts, seconds=time.perf_counter() - began)


async def process(
    collector: GroupCollector,
    problems: Sequence[Problem],
    *,
    group_size: int,
    seed: int,
    at_once: int,
    on_rollout: OnRollout = lambda r: None,
) -> AsyncIterator[dict[str, Any]]:
    """The columns of one group after the other, with its problem; `at_once` problems are attempted together.

    Tokens, masks and logprobs are empty for a chat endpoint.
    """
    for start in range(0, len(problems), at_once):
        some = problems[start : start + at_once]
        keys = [f"process/{seed}/{problem.id}" for problem in some]
        groups = await collector.collect(some, group_size, keys, on_rollout)
        require_one_good(groups)
        for problem, group in zip(some, groups, strict=True):
            text = problem.input if isinstance(problem.input, str) else [to_dict(m) for m in problem.input]
            yield {"input": text, "expect": problem.expect} | group_to_dict(group)
