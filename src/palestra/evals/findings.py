"""Findings: why a run learns little, each derived from its metrics, with an example rollout and settings to change.

`finding_rules.py` has the table of findings. A remedy whose setting has no effect in this kind of run is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from palestra.core.config import RunConfig
from palestra.core.run_folder import RunFolder
from palestra.core.types import Rollout
from palestra.evals.evidence import (
    MIN_STEPS,
    Evidence,
    Example,
    Finding,
    Row,
    RunFacts,
    find_examples,
    recorded_examples,
)
from palestra.evals.finding_rules import HELPS, ROLLOUT_RULES, TRAINING_RULES, Rule
from palestra.evals.rollout_stats import rollout_stats

WINDOW = 5  # newest steps, by which a run in progress is judged
ENVIRONMENT_PROBLEMS = ("measure_errors", "rollout_failures", "context_full")  # worth a warning before training, too
NO_FACTS = RunFacts()
_ENDING = ("train.stop_when_solved", "train.max_sampled_tokens")


def run_findings(
    rows: Sequence[Row],
    *,
    ended: bool = False,
    facts: RunFacts = NO_FACTS,
    examples: Mapping[str, Example] | None = None,
) -> list[Finding]:
    """Findings of a run from its metrics, one row per step. A run in progress is judged by its newest steps."""
    steps = [row for row in rows if "rollouts" in row]
    if len(steps) < (1 if ended else MIN_STEPS):
        return []
    recent = steps[-WINDOW:]
    when = f"in the last {len(recent)} steps" if len(recent) > 1 else "in the only step"
    evidence = Evidence(steps, recent, when, facts, examples or {}, ended)
    return list(_findings(evidence, TRAINING_RULES))


def evaluation_findings(rollouts: Sequence[Rollout], facts: RunFacts = NO_FACTS, source: str = "") -> list[Finding]:
    """Findings of the rollouts of an evaluation; `source` is its name in the run folder, if it has one."""
    if not rollouts:
        return []
    rows = [rollout_stats(rollouts)]
    evidence = Evidence(rows, rows, "in the evaluation", facts, find_examples(rollouts, source))
    return list(_findings(evidence, ROLLOUT_RULES))


def _findings(e: Evidence, rules: Sequence[Sequence[Rule]]) -> Iterator[Finding]:
    """The findings of the first rule that holds in each row of the table."""
    for row in rules:
        rule, cases = next(((rule, cases) for rule in row if (cases := list(rule.cases(e)))), (row[0], []))
        for case in cases:
            remedies = {}
            for text in rule.remedies:
                names = (n for n in re.findall(r"[a-z_]+\.[a-z_]+", text) if n in RunConfig.settings())
                setting = next(names, "")
                if (not setting or e.facts.allows(setting)) and HELPS.get(text, lambda e: True)(e):
                    remedies[text.format(e=e, **case)] = setting
            advice = f" To fix it: {'; or '.join(remedies)}." if remedies else ""
            settings = tuple(dict.fromkeys(filter(None, remedies.values())))
            example = e.examples.get(rule.example)
            yield Finding(rule.kind, f"{rule.text.format(e=e, **case)}.{advice}", settings, example)


def outcome_findings(
    rows: Sequence[Row],
    evaluation: Sequence[Rollout] = (),
    ended_early: str | None = None,
    facts: RunFacts = NO_FACTS,
    examples: Mapping[str, Example] | None = None,
) -> list[Finding]:
    """Findings at the end of a run: of its steps, and those that its last evaluation adds."""
    settings = tuple(name for name in _ENDING if name in (ended_early or ""))
    early = [] if ended_early is None else [Finding("ended_early", f"{ended_early}.", settings)]
    found = [*early, *run_findings(rows, ended=True, facts=facts, examples=examples)]
    known = {finding.kind for finding in found}
    return [*found, *(f for f in evaluation_findings(evaluation, facts, "after") if f.kind not in known)]


def recorded_findings(folder: RunFolder, *, ended: bool) -> list[Finding]:
    """Findings of a run on disk: those of its report.json if it has ended, or what its metrics show so far."""
    recorded = (folder.report() or {}).get("findings") if ended else None
    if isinstance(recorded, list):
        return [finding for record in recorded if (finding := Finding.from_dict(record)) is not None]
    rows, facts = folder.metrics(), RunFacts.of_folder(folder)
    if not run_findings(rows, ended=ended, facts=facts):
        return []
    return run_findings(rows, ended=ended, facts=facts, examples=recorded_examples(folder))


def broken_tool(rollouts: Sequence[Rollout]) -> str | None:
    """The reason why no rollout can use a tool: all call it, and it raises the same message each time, or hangs.

    None if there is no such tool. Calls that the model gets wrong fail in different ways; training can correct these.
    """
    if len(rollouts) < MIN_STEPS:
        return None
    for name in rollouts[0].tool_names:
        calls = [[result for result in r.tool_results if result.call.name == name] for r in rollouts]
        results = [result for row in calls for result in row]
        words = {result.content for result in results}
        if all(calls) and all(result.raised for result in results) and len(words) == 1:
            return f"the tool {name} failed in all of its {len(results)} calls, each time with: {words.pop()}"
    return None
