"""The results of a run on the terminal: transcripts, the before/after table, and the next commands."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from palestra.agent_source import AgentOptions
from palestra.cli.common import table
from palestra.core.messages import show_call
from palestra.core.run_folder import RunFolder
from palestra.core.text import show_path, show_seconds, visible
from palestra.core.types import Message, Rollout, Score
from palestra.evals.evidence import Finding, RunFacts
from palestra.evals.findings import NO_FACTS, evaluation_findings
from palestra.evals.report import (
    Capability,
    EvalReport,
    by_problem,
    compare,
    compare_means,
    opening,
    overall_name,
    pick_transcripts,
)

if TYPE_CHECKING:
    from palestra.train.run import Outcome

_MAX_TEXT_CHARS = 600
_TITLES = {  # by whether a case passed before and passes after
    (False, True): "failed before, passes now",
    (False, False): "fails still",
    (True, True): "passed before, passes now",
    (True, False): "passed before, fails now",
}
_STYLES = {"user": "cyan", "assistant": "bold", "tool": "magenta"}


def print_outcome(console: Console, run: RunFolder, outcome: Outcome) -> dict[str, Any]:
    """Print the results of a training, and return them; of one over the wire, with its first and last mean score."""
    over_wire, more = "env_url" in run.record, dict[str, Any]()
    if outcome.before is not None and outcome.after is not None:
        pairs = [] if over_wire else pick_transcripts(outcome.before.rollouts, outcome.after.rollouts)
        for before, after in pairs:
            console.print()
            console.rule(Text(_TITLES[before.passed, after.passed], style="bold"), align="left", style="dim")
            for message in opening(after.messages):
                _print_message(console, message, 0)
            for label, rollout in (("before", before), ("after", after)):
                mark = Text("✓" if rollout.passed else "✗", style="green" if rollout.passed else "red")
                console.print(Text.assemble(("  " + label, "dim"), " ", mark))
                _print_rollout(console, rollout, 4)
        console.print("\n", change_table(outcome.before, outcome.after), sep="")
    print_findings(console, outcome.findings)
    if over_wire:
        rewards = [row["reward_mean"] for row in outcome.metrics if "reward_mean" in row]
        steps = len({row["step"] for row in outcome.metrics})  # an evaluation adds a row to its step
        more = {"steps": steps, "reward_first": rewards[0], "reward_last": rewards[-1]}
        console.print(f"{steps} steps; mean score {rewards[0]:.3f} at the first, {rewards[-1]:.3f} at the last")
    paths = {"run folder": run.path, "report": outcome.report_path, "model": outcome.model_path}
    rows = {name: show_path(path) for name, path in paths.items()}
    rows |= {} if over_wire else {"score it": score_command(run, outcome.model_path)}
    console.print()
    console.print(Text(f"Done in {show_seconds(outcome.seconds)}. Open the report in a browser.", style="bold green"))
    print_rows(console, rows)
    return more | outcome_summary(run, outcome)


def print_rows(console: Console, rows: Mapping[str, str]) -> None:
    """Names with their values, on one line each, so that they can be copied."""
    for name, text in rows.items():
        console.print(Text.assemble((f"{name:<15}", "dim"), text), soft_wrap=True)


def outcome_summary(run: RunFolder, outcome: Outcome) -> dict[str, Any]:
    """The results of a training as JSON: pass rates by what was scored (held_out or train), and where everything is."""
    scored = {"before": outcome.before, "after": outcome.after}
    return {
        **{f"{report.split}_{when}": report.pass_rate.rate for when, report in scored.items() if report is not None},
        "capability": run.record.get("capability") if run.has_begun else None,
        "findings": [finding.to_dict() for finding in outcome.findings],
        "seconds": round(outcome.seconds, 2),
        "run_dir": str(run.path),
        "model_path": str(outcome.model_path),
        "report": str(outcome.report_path),
    }


def capability_of(report: EvalReport) -> Capability:
    """The capability report of an evaluation, with pass@k where it has several samples of a case."""
    samples = by_problem(report.rollouts)
    return Capability.of(report.rollouts, samples if any(len(group) > 1 for group in samples) else ())


def print_evaluation(console: Console, name: str, report: EvalReport, facts: RunFacts = NO_FACTS) -> None:
    """The table of an evaluation, one rollout that failed, the capability line and the findings."""
    failed = next((r for r in report.rollouts if not r.passed), None)
    if failed is not None:
        console.print(Text("\nOne rollout that failed", style="bold"))
        for message in opening(failed.messages):
            _print_message(console, message, 2)
        _print_rollout(console, failed, 2)
    cases = "" if report.split == "held_out" else ", training cases (none are held out)"
    title = f"{name}: {report.pass_rate.n} rollouts in {show_seconds(report.seconds)}{cases}"
    graded = any(measure.graded for measure in report.measures)
    headings = ["measure", "pass rate (95 % interval)", *(["mean (95 % interval)"] if graded else [])]
    rows = [(m.name, str(m.pass_rate), str(m.mean) if m.graded else "")[: len(headings)] for m in report.measures]
    rows += [(overall_name(report), str(report.pass_rate))] if len(report.measures) > 1 else []
    rows += [("reward", "", str(report.reward))] if graded else []
    console.print()
    console.print(table(headings, rows, title=title))
    console.print(Text(str(capability_of(report)), style="dim"), soft_wrap=True)
    print_findings(console, evaluation_findings(report.rollouts, facts))


def change_table(before: EvalReport, after: EvalReport) -> Table:
    """Before against after: pass rates, then the means of graded measures; a change that may be chance is marked."""
    rates, means = compare(before, after), compare_means(before, after)
    shown = rates if len(rates) > 2 else rates[:1]  # with one measure, "all measures" is the same again
    cases = "Held-out" if after.split == "held_out" else "Training"
    captions = [] if all(change.clear for change in (*shown, *means)) else ["≈ within chance: the intervals overlap"]
    if means:
        lowest = min(before.reward.lowest, after.reward.lowest)
        highest = max(before.reward.highest, after.reward.highest)
        captions.append(f"rewards are from {lowest:.3g} to {highest:.3g}")
    gains = [(change.name, change, f"{100 * change.gain:+.1f}") for change in shown]
    gains += [(f"mean {change.name}", change, f"{change.gain:+.3f}") for change in means]
    rows = []
    for name, change, gain in gains:
        colour = ("green" if change.gain > 0 else "red") if change.clear else "yellow"
        marked = Text(gain if change.clear else f"{gain} ≈", style=colour)
        rows.append((name, str(change.before), str(change.after), marked))
    title = f"{cases} cases, before and after (95 % intervals)"
    return table(("measure", "before", "after", "points"), rows, title=title, caption="; ".join(captions) or None)


def show_score(score: Score) -> str:
    """
    >>> show_score(Score(0.25, False, "1 of 4 words")), show_score(Score(1.0, True))
    ('0.25, 1 of 4 words', 'passed')
    """
    graded = [] if score.value in (0, 1) and score.passed is not None else [f"{score.value:.3g}"]
    reasons = [score.reason] if score.reason else []
    return ", ".join(graded + reasons) or ("passed" if score.passed else "failed")


def _print_rollout(console: Console, rollout: Rollout, indent: int) -> None:
    """The conversation after its opening, in its order, then each measure's value and reason."""
    for message in rollout.messages[len(opening(rollout.messages, with_system=True)) :]:
        _print_message(console, message, indent)
    lines = []
    for name, score in rollout.scores.items():
        style = "dim" if score.passed is None and not score.error else "green" if score.passed else "red"
        lines.append((f"{name}: {show_score(score)}", style))
    lines += [(f"failed: {rollout.error}", "red")] if rollout.error else []
    for text, style in lines:
        console.print(Padding.indent(Text(visible(text), style=style), indent))


def _print_message(console: Console, message: Message, indent: int) -> None:
    if message.text or not message.tool_calls:
        said = (visible(shorten(message.text)), _STYLES.get(message.role, ""))
        console.print(Padding.indent(Text.assemble((f"{message.role}: ", "dim"), said), indent))
    for call in message.tool_calls:
        console.print(Padding.indent(Text.assemble(("calls ", "dim"), (visible(show_call(call)), "blue")), indent))


def shorten(text: str) -> str:
    return text if len(text) <= _MAX_TEXT_CHARS else f"{text[:_MAX_TEXT_CHARS]} … ({len(text)} characters)"


def print_findings(console: Console, findings: Iterable[Finding]) -> None:
    """Print why the model did not learn or pass more, and which settings to change."""
    for finding in findings:
        console.print(Text(f"! {visible(finding.sentence)}", style="yellow"))
        if finding.example is not None:
            console.print(Text(f"  {visible(str(finding.example))}", style="dim"), soft_wrap=True)


def score_command(run: RunFolder, model: Path) -> str:
    """The command that scores the model on the cases that the run held out."""
    record = run.record
    if environment := record.get("environment"):
        options = [word for key, value in environment["settings"].items() for word in (f"--env.{key}", str(value))]
        words = ["env", "evaluate", str(environment["name"]), *options]
    else:
        source = str(record.get("source") or "")
        options = AgentOptions.from_record(record.get("agent_options")).arguments()
        words = ["eval", *([show_path(Path(source))] if source.endswith(".py") else []), *options]
    return shlex.join(["palestra", *words, "--model.name", show_path(model)])
