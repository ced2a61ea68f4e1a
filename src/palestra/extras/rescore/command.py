"""`palestra rescore`: changed measures over stored rollouts: what they would have said, without sampling anything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from palestra.agent_source import load_agent_file
from palestra.cli.common import PATH, returns_data_at_end, table
from palestra.cli.find_run import code_for_tools, require_run, require_trust, run_argument, trust_option
from palestra.core.chat_model import hosting
from palestra.core.errors import InputError, NotFoundError, SettingError
from palestra.core.files import import_file, read_jsonl
from palestra.core.group_codec import rollout_from_dict
from palestra.core.run_folder import RunFolder
from palestra.core.text import visible
from palestra.core.types import Problem, Rollout, Score
from palestra.envs.base import Split
from palestra.envs.discover import load_env
from palestra.evals.measures import Measure, MeasureContext, as_measures, run_group_measure
from palestra.evals.suite import hold_out
from palestra.rollout.local_models import LocalModels
from palestra.train.progress import task

_AT_ONCE = 64  # rollouts
_TIMEOUT_S = 60.0
_MAX_CHANGED = 100  # changed verdicts that are listed


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
    verdicts: dict[str, list[Verdict]] = {measure.name: [] for measure in measures}
    changed: list[dict[str, Any]] = []
    done = missing = 0
    with hosting(LocalModels()), asyncio.Runner() as runner:  # in this order: the runner copies the context
        for groups in _chunks(islice(records, limit)):
            rollouts = [[rollout_from_dict(record) for record in group] for group in groups]
            contexts = [[_context(rollout, problems) for rollout in group] for group in rollouts]
            scored = runner.run(_run(measures, contexts))
            for record, rollout, scores in zip(chain(*groups), chain(*rollouts), scored, strict=True):
                for measure, new in zip(measures, scores, strict=True):
                    verdict = Verdict(int(record.get("step") or 0), rollout.scores.get(measure.name), new)
                    verdicts[measure.name].append(verdict)
                    if verdict.is_changed and len(changed) < _MAX_CHANGED:
                        place = {"problem_id": rollout.problem_id, "measure": measure.name}
                        changed.append({"number": done, **place, **asdict(verdict)})
                missing += rollout.problem_id not in problems
                done += 1
            on_progress(done)
    return {
        "count": done,
        "without_problem": missing,
        "measures": [{"name": name, **_summary(rows)} for name, rows in verdicts.items()],
        "step": sorted({verdict.step for rows in verdicts.values() for verdict in rows}),
        "series": {name: _series(rows) for name, rows in verdicts.items()},
        "changed": changed,
    }


@dataclass(frozen=True, slots=True)
class Verdict:
    """The old verdict of a measure on a rollout, if it has one, and the new one."""

    step: int
    old: Score | None
    new: Score

    @property
    def is_changed(self) -> bool:
        old, new = self.old, self.new
        return old is not None and (old.value, old.passed, old.error) != (new.value, new.passed, new.error)


def _summary(rows: Sequence[Verdict]) -> dict[str, Any]:
    old = [row.old for row in rows if row.old is not None]
    new = [row.new for row in rows]
    errors = sum(score.error for score in new)
    changed = sum(row.is_changed for row in rows)
    return {"old": _rates(old) if old else None, "new": {**_rates(new), "errors": errors}, "changed": changed}


def _series(rows: Sequence[Verdict]) -> dict[str, list[float | None]]:
    """The mean values of each step."""
    steps = [list(group) for _, group in groupby(sorted(rows, key=attrgetter("step")), attrgetter("step"))]
    return {name: [_rates([getattr(row, name) for row in step])["mean"] for step in steps] for name in ("old", "new")}


def _chunks(records: Iterable[Mapping[str, Any]]) -> Iterator[list[list[Mapping[str, Any]]]]:
    """Groups of siblings, which are stored one after the other, with _AT_ONCE rollouts or more."""
    groups: list[list[Mapping[str, Any]]] = []
    for _, siblings in groupby(records, lambda record: (record.get("step"), record["problem_id"])):
        groups.append(list(siblings))
        if sum(map(len, groups)) >= _AT_ONCE:
            yield groups
            groups = []
    if groups:
        yield groups


async def _run(measures: Sequence[Measure], groups: Sequence[Sequence[MeasureContext]]) -> list[tuple[Score, ...]]:
    """The scores of each rollout by all measures."""

    async def column(measure: Measure) -> list[Score]:
        return list(chain(*await asyncio.gather(*(run_group_measure(measure, group, _TIMEOUT_S) for group in groups))))

    return list(zip(*await asyncio.gather(*map(column, measures)), strict=True))


def _context(rollout: Rollout, problems: Mapping[str, Problem]) -> MeasureContext:
    problem = problems.get(rollout.problem_id) or Problem(rollout.problem_id, "")
    texts = [message.text for message in rollout.messages if message.role == "tool"]
    calls = [call for message in rollout.messages for call in message.tool_calls]
    found = []
    for i, result in enumerate(rollout.tool_results):
        call = calls[i] if i < len(calls) and calls[i].name == result.call.name else result.call
        found.append(replace(result, call=call, content=texts[i] if i < len(texts) else ""))
    return MeasureContext(rollout.messages, found, problem.expect, problem)


def _rates(scores: Iterable[Score | None]) -> dict[str, float | None]:
    valid = [score for score in scores if score is not None and not score.error]
    verdicts = [bool(score.passed) for score in valid if score.passed is not None]
    return {"mean": _mean([score.value for score in valid]), "pass_rate": _mean(verdicts)}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


@click.command("rescore")
@run_argument()
@click.option("--measures", "file", required=True, type=PATH, metavar="FILE", help="With @measure.")
@click.option("--kind", default="train", show_default=True, help="train, before, after, or the step of an evaluation.")
@click.option("--limit", type=click.IntRange(1), help="Only the first rollouts.")
@click.option("--agent", "agent_file", metavar="FILE", help="Where the cases are. [default: the run's own]")
@trust_option
@returns_data_at_end
def command(
    run: str, file: Path, kind: str, limit: int | None, agent_file: str | None, trust: bool, console: Console
) -> dict[str, Any]:
    """Score the stored rollouts of a run with changed measures, and compare with the stored scores.

    \b
    palestra rescore k3f9 --measures stricter.py
    palestra rescore runs/my-agent-20260131-101500 --measures my_agent.py --kind after
    """
    folder = require_run(run)
    if agent_file is None:
        require_trust(folder, code_for_tools(folder.record), trust)
    if not file.is_file():
        raise NotFoundError(f"there is no file {file}; give a Python file with functions that have @measure")
    module = import_file(file.resolve(), str(file), "It declares measures with @measure")
    declared = {value.name: value for value in vars(module).values() if isinstance(value, Measure)}
    measures = as_measures(getattr(module, "measures", None) or list(declared.values()))
    if not measures:
        raise InputError(f"{file} declares no measure; write a function with @measure above it")
    files = {str(name): folder.eval_file(name) for name in folder.eval_names()}
    files |= {"train": folder.rollouts_file} if folder.rollouts_file.is_file() else {}
    if kind not in files:
        raise NotFoundError(f"{folder.path} has no rollouts of the kind {kind!r}; it has {', '.join(files) or 'none'}")
    problems = _problems_of(folder, "train" if kind == "train" else "held_out", agent_file)
    with task(console, "scoring", unit="rollouts") as phase:
        rescored = rescore(read_jsonl(files[kind]), measures, problems, limit=limit, on_progress=phase.advance)
    _print_rescored(console, rescored)
    return rescored


def _problems_of(folder: RunFolder, split: Split, agent_file: str | None) -> Mapping[str, Problem]:
    """The problems by id, for what they expect: of the agent file or the environment that the run was trained on."""
    if agent_file is None and (environment := folder.environment()):
        return {problem.id: problem for problem in load_env(*environment).problems(split)}
    source = agent_file or folder.record.get("source")
    if source is None:
        raise SettingError(f"{folder.path} was started from Python: name the file with its cases by --agent FILE")
    file = load_agent_file(None if source == "demo" else str(source))
    trained, held_out = hold_out(file.suite, file.held_out)
    cases = trained if split == "train" or held_out is None else held_out
    return {case.own_id: case for case in cases} | {case.id: case for case in cases}  # old runs have their own ids


def _print_rescored(console: Console, rescored: Mapping[str, Any]) -> None:
    rows = [
        (visible(row["name"]), _rate(row["old"]), _rate(row["new"]), str(row["changed"]), str(row["new"]["errors"]))
        for row in rescored["measures"]
    ]
    console.print(table(("measure", "then", "now", "changed", "errors"), rows, box=None, pad_edge=False))
    for row in rescored["changed"][:3]:
        old, new = (visible(f"{row[when]['value']:g} {row[when]['reason']}".strip()) for when in ("old", "new"))
        console.print(f"step {row['step']}, {visible(row['problem_id'])}: {old} → {new}", highlight=False, markup=False)
    if rescored["without_problem"]:
        console.print(f"{rescored['without_problem']} rollouts are of problems that are not known here: expect is None")


def _rate(row: Mapping[str, float | None] | None) -> str:
    if row is None or row["mean"] is None:
        return "–"
    return f"{row['mean']:.4g}" if row["pass_rate"] is None else f"{row['pass_rate']:.1%}"
