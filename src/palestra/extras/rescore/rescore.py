"""Changed measures over stored rollouts: what they would have said, without sampling anything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, islice
from typing import Any

from palestra.core.chat_model import hosting
from palestra.core.group_codec import rollout_from_dict
from palestra.core.types import Problem, Rollout, Score
from palestra.evals.measures import Measure, MeasureContext, run_group_measure
from palestra.rollout.local_models import LocalModels

_AT_ONCE = 64  # rollouts
_TIMEOUT_S = 60.0
_MAX_CHANGED = 100  # changed verdicts that are listed


@dataclass(slots=True)
class _Tally:
    """One measure: what it said, and says now."""

    old: list[Score] = field(default_factory=list)
    new: list[Score] = field(default_factory=list)
    changed: int = 0
    by_step: dict[int, tuple[list[float], list[float]]] = field(default_factory=dict)  # old and new values

    def add(self, step: int, old: Score | None, new: Score) -> bool:
        self.new.append(new)
        olds, news = self.by_step.setdefault(step, ([], []))
        news += [] if new.error else [new.value]
        if old is None:
            return False
        self.old.append(old)
        olds += [] if old.error else [old.value]
        is_changed = (old.value, old.passed, old.error) != (new.value, new.passed, new.error)
        self.changed += is_changed
        return is_changed

    def to_dict(self, name: str) -> dict[str, Any]:
        errors = sum(score.error for score in self.new)
        old = _rates(self.old) if self.old else None
        return {"name": name, "old": old, "new": {**_rates(self.new), "errors": errors}, "changed": self.changed}


def rescore(
    records: Iterable[Mapping[str, Any]],
    measures: Sequence[Measure],
    problems: Mapping[str, Problem],
    *,
    limit: int | None = None,
    on_progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """What the measures say of the rollouts on disk, beside what was said when they were sampled.

    `problems` have what was expected, by id. The state that tools worked on is gone: `ctx.context` is None. Measures
    that compare attempts get those of one step at one problem.
    """
    tallies = {measure.name: _Tally() for measure in measures}
    changed: list[dict[str, Any]] = []
    done = missing = 0
    with hosting(LocalModels()), asyncio.Runner() as runner:  # in this order: the runner copies the context
        for chunk in _chunks(islice(records, limit)):
            rollouts = [rollout_from_dict(record) for record in chunk]
            missing += sum(rollout.problem_id not in problems for rollout in rollouts)
            contexts = [_context(rollout, problems) for rollout in rollouts]
            siblings = [(record.get("step"), record["problem_id"]) for record in chunk]
            scored = runner.run(_run(measures, contexts, siblings))
            for number, (record, rollout, scores) in enumerate(zip(chunk, rollouts, scored, strict=True), start=done):
                step = int(record.get("step") or 0)
                for name, new in scores.items():
                    old = rollout.scores.get(name)
                    if tallies[name].add(step, old, new) and old is not None and len(changed) < _MAX_CHANGED:
                        place = {"number": number, "step": step, "problem_id": rollout.problem_id, "measure": name}
                        changed.append({**place, "old": asdict(old), "new": asdict(new)})
            done += len(chunk)
            on_progress(done)
    steps = sorted({step for tally in tallies.values() for step in tally.by_step})
    series = {}
    for name, tally in tallies.items():
        rows = [tally.by_step.get(step, ([], [])) for step in steps]
        series[name] = {"old": [_mean(old) for old, _ in rows], "new": [_mean(new) for _, new in rows]}
    return {
        "count": done,
        "without_problem": missing,
        "measures": [tally.to_dict(name) for name, tally in tallies.items()],
        "step": steps,
        "series": series,
        "changed": changed,
    }


def _chunks(records: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """Some at a time; siblings, which are stored one after the other, stay together."""
    chunk: list[Mapping[str, Any]] = []
    for _, siblings in groupby(records, lambda record: (record.get("step"), record["problem_id"])):
        chunk += siblings
        if len(chunk) >= _AT_ONCE:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


async def _run(
    measures: Sequence[Measure], contexts: Sequence[MeasureContext], siblings: Sequence[Any]
) -> list[dict[str, Score]]:
    groups = [[contexts[i] for i in members] for _, members in groupby(range(len(contexts)), siblings.__getitem__)]

    async def column(measure: Measure) -> list[Score]:
        rows = await asyncio.gather(*(run_group_measure(measure, group, _TIMEOUT_S) for group in groups))
        return [score for row in rows for score in row]

    columns = await asyncio.gather(*map(column, measures))
    names = [measure.name for measure in measures]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _context(rollout: Rollout, problems: Mapping[str, Problem]) -> MeasureContext:
    problem = problems.get(rollout.problem_id) or Problem(rollout.problem_id, "")
    texts = [message.text for message in rollout.messages if message.role == "tool"]
    calls = [call for message in rollout.messages for call in message.tool_calls]
    found = []
    for i, result in enumerate(rollout.tool_results):
        call = calls[i] if i < len(calls) and calls[i].name == result.call.name else result.call
        found.append(replace(result, call=call, content=texts[i] if i < len(texts) else ""))
    return MeasureContext(rollout.messages, found, problem.expect, problem)


def _rates(scores: Sequence[Score]) -> dict[str, float | None]:
    valid = [score for score in scores if not score.error]
    verdicts = [bool(score.passed) for score in valid if score.passed is not None]
    return {"mean": _mean([score.value for score in valid]), "pass_rate": _mean(verdicts)}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
