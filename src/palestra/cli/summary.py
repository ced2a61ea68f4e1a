"""The results of a run on the terminal: transcripts, the before/after table, and the next commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from palestra.agent_source import AgentOptions
from palestra.core.messages import show_call
from palestra.core.ranks import is_first_rank
from palestra.core.run_folder import RunFolder
from palestra.core.show import show_path, show_seconds, visible
from palestra.core.types import Message, Rollout, Score
from palestra.evals.capability import Capability, by_problem
from palestra.evals.evidence import Finding, RunFacts
from palestra.evals.findings import NO_FACTS, evaluation_findings
from palestra.evals.report import (
    Change,
    EvalReport,
    Mean,
    Rate,
    compare,
    compare_means,
    opening,
    overall_name,
    pick_transcripts,
)

if TYPE_CHECKING:
    from palestra.train.run import Outcome

_MAX_TEXT_CHARS = 600
_STYLES = {"user": "cyan", "assistant": "bold", "tool": "magenta"}


def print_outcome(console: Console, run: RunFolder, outcome: Outcome, as_json: bool) -> None:
    """The results of a training; of one over the wire, the mean scores, and before and after if it was scored here."""
    more: dict[str, Any] = {}
    if "env_url" in run.record:
        more = _print_wire(console, outcome)
    else:
        if outcome.before is not None and outcome.after is not None:
            _print_transcripts(console, outcome.before, outcome.after)
            console.print()
            console.print(change_table(outcome.before, outcome.after))
        print_findings(console, outcome.findings)
        _print_next(console, run, outcome)
    if as_json and is_first_rank():
        click.echo(json.dumps(more | outcome_summary(run, outcome)))


def _print_wire(console: Console, outcome: Outcome) -> dict[str, Any]:
    if outcome.before is not None and outcome.after is not None:
        console.print(change_table(outcome.before, outcome.after))
    print_findings(console, outcome.findings)
    rewards = [row["reward_mean"] for row in outcome.metrics if "reward_mean" in row]
    steps = len({row["step"] for row in outcome.metrics})  # an evaluation adds a row to its step
    console.print(
        f"{steps} steps in {show_seconds(outcome.seconds)}; mean score {rewards[0]:.3f} at the first, "
        f"{rewards[-1]:.3f} at the last\nthe trained model: {outcome.model_path}\n"
        f"report: {show_path(outcome.report_path)}",
        highlight=False,
    )
    return {"steps": steps, "reward_first": rewards[0], "reward_last": rewards[-1]}


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
    table = Table(title=title, title_justify="left")
    table.add_column("measure")
    table.add_column("pass rate (95 % interval)", justify="right")
    graded = any(measure.graded for measure in report.measures)
    if graded:
        table.add_column("mean (95 % interval)", justify="right")
    for measure in report.measures:
        mean = [show_interval(measure.mean)] if measure.graded else []
        table.add_row(measure.name, show_interval(measure.pass_rate), *mean)
    if len(report.measures) > 1:
        table.add_row(overall_name(report), show_interval(report.pass_rate), style="bold")
    if graded:
        table.add_row("reward", "", show_interval(report.reward))
    console.print()
    console.print(table)
    console.print(Text(str(capability_of(report)), style="dim"), soft_wrap=True)
    print_findings(console, evaluation_findings(report.rollouts, facts))


def change_table(before: EvalReport, after: EvalReport) -> Table:
    """Before against after: pass rates, then the means of graded measures; a change that may be chance is marked."""
    rates, means = compare(before, after), compare_means(before, after)
    shown = rates if len(rates) > 2 else rates[:1]  # with one measure, "all measures" is the same again
    cases = "Held-out" if after.split == "held_out" else "Training"
    table = Table(title=f"{cases} cases, before and after (95 % intervals)", title_justify="left")
    captions = [] if all(change.clear for change in (*shown, *means)) else ["≈ within chance: the intervals overlap"]
    if means:
        lowest = min(before.reward.lowest, after.reward.lowest)
        highest = max(before.reward.highest, after.reward.highest)
        captions.append(f"rewards are from {lowest:.3g} to {highest:.3g}")
    table.caption, table.caption_justify = "; ".join(captions) or None, "left"
    table.add_column("measure")
    for heading in ("before", "after", "points"):
        table.add_column(heading, justify="right", no_wrap=True)
    for change in shown:
        table.add_row(change.name, *_change_cells(change, f"{100 * change.gain:+.1f}"))
    for change in means:
        table.add_row(f"mean {change.name}", *_change_cells(change, f"{change.gain:+.3f}"))
    return table


def _change_cells(change: Change, gain: str) -> tuple[str, str, Text]:
    colour = ("green" if change.gain > 0 else "red") if change.clear else "yellow"
    marked = Text(f"{gain}{'' if change.clear else ' ≈'}", style=colour)
    return show_interval(change.before), show_interval(change.after), marked


def show_score(score: Score) -> str:
    """
    >>> show_score(Score(0.25, False, "1 of 4 words")), show_score(Score(1.0, True))
    ('0.25, 1 of 4 words', 'passed')
    """
    graded = [] if score.value in (0, 1) and score.passed is not None else [f"{score.value:.3g}"]
    reasons = [score.reason] if score.reason else []
    return ", ".join(graded + reasons) or ("passed" if score.passed else "failed")


def show_interval(value: Rate | Mean) -> str:
    """
    >>> show_interval(Rate.of(30, 100)), show_interval(Mean.of([0.5, 0.7]))
    ('30.0 % (21.9–39.6)', '0.600 (0.500–0.700)')
    """
    if isinstance(value, Mean):
        return f"{value.value:.3f} ({value.low:.3f}–{value.high:.3f})"
    rate = value
    return f"{100 * rate.rate:.1f} % ({100 * rate.low:.1f}–{100 * rate.high:.1f})"


def _print_transcripts(console: Console, before_report: EvalReport, after_report: EvalReport) -> None:
    titles = {
        (False, True): "failed before, passes now",
        (False, False): "fails still",
        (True, True): "passed before, passes now",
        (True, False): "passed before, fails now",
    }
    for before, after in pick_transcripts(before_report.rollouts, after_report.rollouts):
        console.print()
        console.rule(Text(titles[before.passed, after.passed], style="bold"), align="left", style="dim")
        for message in opening(after.messages):
            _print_message(console, message, 0)
        for label, rollout in (("before", before), ("after", after)):
            mark = Text("✓" if rollout.passed else "✗", style="green" if rollout.passed else "red")
            console.print(Text.assemble(("  " + label, "dim"), " ", mark))
            _print_rollout(console, rollout, 4)


def _print_rollout(console: Console, rollout: Rollout, indent: int) -> None:
    """The conversation after its opening, in its order, then each measure's value and reason."""
    for message in rollout.messages[len(opening(rollout.messages, with_system=True)) :]:
        _print_message(console, message, indent)
    for name, score in rollout.scores.items():
        style = "dim" if score.passed is None and not score.error else "green" if score.passed else "red"
        _print_text(console, Text(visible(f"{name}: {show_score(score)}"), style=style), indent)
    if rollout.error:
        _print_text(console, Text(visible(f"failed: {rollout.error}"), style="red"), indent)


def _print_message(console: Console, message: Message, indent: int) -> None:
    style = _STYLES.get(message.role, "")
    if message.text or not message.tool_calls:
        text = visible(shorten(message.text))
        _print_text(console, Text.assemble((f"{message.role}: ", "dim"), (text, style)), indent)
    for call in message.tool_calls:
        _print_text(console, Text.assemble(("calls ", "dim"), (visible(show_call(call)), "blue")), indent)


def _print_text(console: Console, text: Text, indent: int) -> None:
    console.print(Padding(text, (0, 0, 0, indent), expand=False))


def shorten(text: str) -> str:
    return text if len(text) <= _MAX_TEXT_CHARS else f"{text[:_MAX_TEXT_CHARS]} … ({len(text)} characters)"


def print_findings(console: Console, findings: Iterable[Finding]) -> None:
    """What kept the model from learning or passing more, and what to change."""
    for finding in findings:
        console.print(Text(f"! {visible(finding.sentence)}", style="yellow"))
        if finding.example is not None:
            console.print(Text(f"  {visible(str(finding.example))}", style="dim"), soft_wrap=True)


def _print_next(console: Console, run: RunFolder, outcome: Outcome) -> None:
    rows = [
        ("run folder", show_path(run.path)),
        ("report", show_path(outcome.report_path)),
        ("model", show_path(outcome.model_path)),
        ("score it", score_command(run, outcome.model_path)),
    ]
    console.print()
    console.print(Text(f"Done in {show_seconds(outcome.seconds)}. Open the report in a browser.", style="bold green"))
    for label, text in rows:  # on one line each, so that they can be copied
        console.print(Text.assemble((f"{label:<12}", "dim"), text), soft_wrap=True)


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
