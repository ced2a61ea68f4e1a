"""`palestra judge-check labels.jsonl`: does a judge agree with people?"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from palestra.cli.common import PATH, returns_data_at_end
from palestra.core.chat_model import hosting, logging_calls
from palestra.core.errors import InputError, NotFoundError, PalestraError, SettingError
from palestra.core.files import import_function, read_jsonl
from palestra.core.messages import as_messages, prompt_length
from palestra.core.text import visible
from palestra.core.types import Message, Problem, Score
from palestra.evals.judge import judge, ruler
from palestra.evals.measures import Measure, MeasureContext, as_measure, run_group_measure
from palestra.evals.rollout_stats import answer_length, correlation
from palestra.rollout.local_models import LocalModels

_TIMEOUT_S = 600.0
_FORM = '{"input": "…", "answer": "…", "label": 0.8}'
_RESAMPLES = 2000
_LEVEL = 0.95
_FLAGGED = 0.5  # correlation with the length that is beyond that of the labels by as much


@click.command("judge-check")
@click.argument("labels", type=PATH)
@click.option("--measure", "spec", metavar="FILE:NAME", help="The judge, as score.py:quality.")
@click.option("--model", help="Or its model: a name at --base-url, a local model (local/NAME, a folder).")
@click.option("--base-url", help="An OpenAI-style endpoint. [default: OPENAI_BASE_URL, else api.openai.com]")
@click.option("--rubric", default="", help="What the model grades by. [default: the column `rubric`]")
@click.option("--rank", is_flag=True, help="Rank the attempts at a case in one call (ruler), not one by one (judge).")
@returns_data_at_end
def command(
    labels: Path,
    spec: str | None,
    model: str | None,
    base_url: str | None,
    rubric: str,
    rank: bool,
    console: Console,
) -> dict[str, Any]:
    """Compare a judge with labels of people: Kendall's tau with a 95 % interval.

    A line of the file is one attempt with its label, a number (higher is better) or true/false: `input` and `answer`,
    or whole `messages`; optionally `expect`, `rubric`, and `case`, by which attempts at one case belong together
    (otherwise by their input).

    \b
    palestra judge-check labels.jsonl --measure my_agent.py:quality
    palestra judge-check labels.jsonl --model qwen3:8b --base-url http://localhost:11434/v1 --rubric "Be polite."
    """
    measure = _measure(spec, model, base_url, rubric, rank)
    groups = read_labels(labels)
    with hosting(LocalModels()), logging_calls() as calls:
        scores = asyncio.run(_score(measure, [[context for context, _ in group] for group in groups]))
    summary = _compare(groups, scores)
    summary["judge"] = {name.partition("/")[2]: value for name, value in calls.counts.items()}
    _print(console, measure.name, summary)
    return summary


def _measure(spec: str | None, model: str | None, base_url: str | None, rubric: str, rank: bool) -> Measure:
    if (spec is None) == (model is None):
        raise SettingError("name the judge: --measure my_agent.py:quality, or --model NAME with --rubric")
    if spec is not None:
        if base_url or rubric or rank:
            raise SettingError("--base-url, --rubric and --rank go with --model; a --measure has its own")
        return as_measure(import_function(spec, "--measure"))
    own = rubric or (lambda case: case.get("rubric", ""))
    return (ruler if rank else judge)(str(model), own, base_url=base_url)


Labelled = tuple[MeasureContext, float]


def read_labels(path: Path) -> list[list[Labelled]]:
    """The attempts with their labels, by case."""
    if not path.is_file():
        raise NotFoundError(f"there is no file {path}; each of its lines is an attempt with a label: {_FORM}")
    groups: dict[str, list[Labelled]] = {}
    for number, row in enumerate(read_jsonl(path), start=1):
        context, label = _labelled(row, f"{path}, attempt {number}")
        key = row.get("case", row.get("input"))
        if key is None:  # the messages before the first answer
            key = [message.text for message in context.messages[: prompt_length(context.messages)]]
        groups.setdefault(json.dumps(key), []).append((context, label))
    if not groups:
        raise InputError(f"{path} has no attempts; each line is one with a label: {_FORM}")
    return list(groups.values())


def _labelled(row: Mapping[str, Any], where: str) -> Labelled:
    label = row.get("label")
    if not isinstance(label, bool | int | float):
        raise InputError(f"{where} has the label {label!r}; expected a number or true/false: {_FORM}")
    try:
        if "messages" in row:
            messages = as_messages(row["messages"])
        else:
            messages = (*as_messages(row["input"]), Message("assistant", str(row["answer"])))
    except KeyError as error:
        raise InputError(f"{where} has no {error}; expected `messages`, or `input` and `answer`: {_FORM}") from None
    except PalestraError as error:
        raise InputError(f"{where}: {error}") from None
    case = Problem(str(row.get("case", "")), messages[:1], row.get("expect"), row)
    return MeasureContext(messages, (), case.expect, case), float(label)


async def _score(measure: Measure, groups: Sequence[Sequence[MeasureContext]]) -> list[list[Score]]:
    return list(await asyncio.gather(*(run_group_measure(measure, group, _TIMEOUT_S) for group in groups)))


def _compare(groups: Sequence[Sequence[Labelled]], scores: Sequence[Sequence[Score]]) -> dict[str, Any]:
    rows = [list(zip(group, found, strict=True)) for group, found in zip(groups, scores, strict=True)]
    valid = [[(s, label, answer_length(c.messages)) for (c, label), s in row if not s.error] for row in rows]
    lost = [score.reason for row in scores for score in row if score.error]
    pooled = [[(s.value, label) for s, label, _ in row] for row in valid]
    if all(len(row) < 2 for row in pooled):  # one attempt at each case: compare all with all
        pooled = [[pair for row in pooled for pair in row]]
    result = agreement([row for row in pooled if row])
    flat = [item for row in valid for item in row]
    lengths = [float(length) for _, _, length in flat]
    by_length = {
        "judge": correlation(lengths, [s.value for s, _, _ in flat]) if flat else None,
        "labels": correlation(lengths, [label for _, label, _ in flat]) if flat else None,
    }
    prefers = (by_length["judge"] or 0.0) - max(0.0, by_length["labels"] or 0.0) >= _FLAGGED
    return {
        "attempts": sum(map(len, groups)),
        "cases": len(groups),
        "no_verdict": len(lost),
        "first_error": lost[0] if lost else None,
        "agreement": None if result is None else asdict(result),
        "length_correlation": by_length,
        "prefers_length": prefers,
    }


def _print(console: Console, name: str, summary: Mapping[str, Any]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_row("judge", visible(name))
    table.add_row(
        "attempts", f"{summary['attempts']} at {summary['cases']} cases, {summary['no_verdict']} without a verdict"
    )
    if (result := summary["agreement"]) is None:
        table.add_row("agreement", "unknown: no two attempts at a case have different labels and a verdict")
    else:
        tau = f"{result['tau']:.2f} (95 % interval {result['low']:.2f} to {result['high']:.2f})"
        table.add_row("Kendall's tau", tau)
        table.add_row("pairs", f"{result['agreed']:.0%} of {result['pairs']} ordered as by the labels")
    lengths = {k: "–" if v is None else f"{v:.2f}" for k, v in summary["length_correlation"].items()}
    table.add_row("length", f"correlation with the score {lengths['judge']}, with the label {lengths['labels']}")
    calls, tokens, cost = (summary["judge"].get(name, 0) for name in ("calls", "tokens", "cost"))
    table.add_row("used", f"{calls:.0f} calls, {tokens:.0f} tokens, {cost:.4g} $")
    console.print(table)
    if summary["prefers_length"]:
        console.print("The judge prefers long answers, the labels do not: say in the rubric that length is no merit.")
    if summary["first_error"]:
        console.print(f"first error: {visible(summary['first_error'])}", highlight=False, markup=False)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Kendall's τ-b of a judge's scores and labels, over the pairs within each group."""

    tau: float
    low: float
    high: float
    pairs: int  # whose labels differ
    agreed: float  # the share of these that the judge orders as the labels do; a tie counts half


Scored = Sequence[tuple[float, float]]  # (judge's score, label) of the attempts of one group


def agreement(groups: Sequence[Scored], seed: int = 0) -> Agreement | None:
    """With a 95 % interval by resampling groups (single attempts where there is one group); None without pairs."""
    counts = [_count_pairs(group) for group in groups]
    total = _add(counts)
    tau = _tau_b(total)
    if tau is None:
        return None
    rng = random.Random(seed)
    taus = []
    for _ in range(_RESAMPLES):
        if len(groups) > 1:
            drawn = _tau_b(_add(rng.choices(counts, k=len(counts))))
        else:
            drawn = _tau_b(_count_pairs(rng.choices(groups[0], k=len(groups[0]))))
        taus += [] if drawn is None else [drawn]
    taus.sort()
    cut = round((1 - _LEVEL) / 2 * len(taus))
    low, high = (taus[cut], taus[-1 - cut]) if taus else (tau, tau)
    concordant, discordant, tied_scores, _ = total
    pairs = concordant + discordant + tied_scores
    return Agreement(tau, min(low, tau), max(high, tau), pairs, (concordant + tied_scores / 2) / pairs)


Pairs = tuple[int, int, int, int]  # concordant, discordant, tied in scores only, tied in labels only


def _count_pairs(group: Scored) -> Pairs:
    counts = [0, 0, 0, 0]
    for (score, label), (other_score, other_label) in combinations(group, 2):
        by_score, by_label = score - other_score, label - other_label
        if abs(by_score) > 1e-9 and abs(by_label) > 1e-9:
            counts[0 if (by_score > 0) == (by_label > 0) else 1] += 1
        elif abs(by_label) > 1e-9:
            counts[2] += 1
        elif abs(by_score) > 1e-9:
            counts[3] += 1
    return counts[0], counts[1], counts[2], counts[3]


def _add(rows: Sequence[Pairs]) -> Pairs:
    a, b, c, d = (sum(column) for column in zip((0, 0, 0, 0), *rows, strict=True))
    return a, b, c, d


def _tau_b(counts: Pairs) -> float | None:
    """
    >>> _tau_b((3, 0, 0, 0)), _tau_b((1, 1, 0, 0)), _tau_b((0, 0, 0, 4))
    (1.0, 0.0, None)
    """
    concordant, discordant, tied_scores, tied_labels = counts
    by_label, by_score = concordant + discordant + tied_scores, concordant + discordant + tied_labels
    if not by_label:
        return None
    return (concordant - discordant) / math.sqrt(by_label * by_score) if by_score else 0.0
