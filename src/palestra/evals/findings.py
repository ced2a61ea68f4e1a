"""Why nothing is learned: what the metrics of a run say about it, each in one sentence with the setting to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from palestra.core.types import Rollout
from palestra.evals.rollout_stats import rollout_stats

Row = Mapping[str, float]

WINDOW = 5  # the newest steps, which say how it goes now
MIN_STEPS = 3  # before a run that goes on is judged
NO_MATTER_OF_LEARNING = ("measure_errors", "rollout_failures", "context_full")  # worth saying before a training, too
_CUT_OFF_RATE = 0.3
_FAILURE_RATE = 0.1
_WRONG_CALLS = 0.9
_COLLAPSE = 0.2  # of the first steps' value
_WAITING = 0.5  # of a step's time, in which the device computed nothing
_DROPPED = 0.2  # of the groups, for their age
_OLD = 4.0  # versions; one or two are usual
_CLIPPED = 0.2  # of the tokens


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that keeps a run from learning. `settings` are the config's keys that may help."""

    kind: str
    sentence: str
    settings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.sentence

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def run_findings(rows: Sequence[Row], *, ended: bool = False) -> list[Finding]:
    """What the metrics of a run, one row a step, say; of one that goes on, how it goes at the moment."""
    steps = [row for row in rows if "rollouts" in row]
    if len(steps) < (1 if ended else MIN_STEPS):
        return []
    recent = steps[-WINDOW:]
    when = f"in the last {len(recent)} steps" if len(recent) > 1 else "in the only step"
    found = [
        *_without_signal(steps if ended else recent, ended),
        *_of_rollouts(recent, when, called_before=any(row.get("tool_calls_mean") for row in steps)),
        *_collapse(steps),
        *_stale(recent, when),
        *_idle(recent, when),
    ]
    if hung := recent[-1].get("hung_calls"):
        found.append(
            Finding(
                "hung_calls",
                f"{hung:.0f} calls of tools or measures ran past their time limit and still hold a thread each; give "
                "what they wait for a time limit of its own, or make them async.",
                ("rollout.tool_timeout_s",),
            )
        )
    return found


def evaluation_findings(rollouts: Sequence[Rollout]) -> list[Finding]:
    """The same for the rollouts of an evaluation."""
    return list(_of_rollouts([rollout_stats(rollouts)], "in the evaluation")) if rollouts else []


def outcome_findings(
    rows: Sequence[Row], evaluation: Sequence[Rollout] = (), ended_early: str | None = None
) -> list[Finding]:
    """What to say at the end of a run: of its steps, and what the last evaluation adds."""
    early = [] if ended_early is None else [Finding("ended_early", f"{ended_early}.", ("train.stop_when_solved",))]
    found = [*early, *run_findings(rows, ended=True)]
    known = {finding.kind for finding in found}
    return [*found, *(finding for finding in evaluation_findings(evaluation) if finding.kind not in known)]


def recorded_findings(report: Mapping[str, Any] | None, rows: Sequence[Row], *, ended: bool) -> list[str]:
    """The sentences for a run on disk: those of its report.json, or what its metrics say so far."""
    recorded = None if report is None else report.get("findings")
    if isinstance(recorded, list):
        return [str(finding["sentence"]) for finding in recorded if isinstance(finding, dict) and "sentence" in finding]
    return [finding.sentence for finding in run_findings(rows, ended=ended)]


def broken_tool(rollouts: Sequence[Rollout]) -> str | None:
    """Why no rollout can use a tool: all call it, and it raises each time with the same message, or hangs.

    None if there is none. A call that the model got wrong fails differently each time, and is what a training is for.
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


def _without_signal(steps: Sequence[Row], ended: bool) -> Iterator[Finding]:
    """Steps that changed nothing: no group had siblings with different rewards."""
    idle = [row for row in steps if row.get("equal_reward_groups") == 1.0]
    if len(idle) < (max(1, len(steps) / 2) if ended else len(steps)):
        return
    lowest, highest = min(row["reward_min"] for row in idle), max(row["reward_max"] for row in idle)
    count = f"{len(idle)} of {len(steps)} steps" if ended else f"the last {len(idle)} steps"
    if all(row.get("pass_rate") == 1.0 for row in idle):
        yield Finding(
            "solved",
            f"in {count} every rollout passed, so there was nothing left to learn: use harder cases, or "
            "stop there with train.stop_when_solved.",
            ("train.stop_when_solved",),
        )
    elif lowest == highest == 0.0:
        yield Finding(
            "zero_reward",
            f"in {count} every rollout earned a reward of 0, so nothing was learned: begin with easier cases, give "
            "part of the score for partial progress (a measure with values between 0 and 1), or raise "
            "rollout.group_size and rollout.temperature so that some rollouts succeed.",
            ("rollout.group_size", "rollout.temperature"),
        )
    else:
        yield Finding(
            "equal_rewards",
            f"in {count} all rollouts of a problem earned the same reward, so nothing was learned: raise "
            "rollout.temperature or rollout.group_size, or use a measure with values between 0 and 1.",
            ("rollout.temperature", "rollout.group_size"),
        )


def _of_rollouts(rows: Sequence[Row], when: str, *, called_before: bool = False) -> Iterator[Finding]:
    yield from _failures(rows, when)
    yield from _tools(rows, when, called_before)
    yield from _cut_off(rows, when)


def _failures(rows: Sequence[Row], when: str) -> Iterator[Finding]:
    count, failed = (sum(row.get(name, 0.0) for row in rows) for name in ("rollouts", "rollout_failures"))
    for name in dict.fromkeys(key for row in rows for key in row if key.startswith("measure_errors/")):
        errors = sum(row.get(name, 0.0) for row in rows)
        yield Finding(
            "measure_errors",
            f"the measure {name.partition('/')[2]} failed by itself in {errors:.0f} of {count:.0f} rollouts {when}; "
            "they are left out. A training keeps the reasons in rollouts.jsonl and evals/.",
        )
    if failed > _FAILURE_RATE * count:
        yield Finding(
            "rollout_failures",
            f"{failed:.0f} of {count:.0f} rollouts {when} failed with an error and trained nothing; rollouts.jsonl and "
            "evals/ have the reasons.",
        )


def _tools(rows: Sequence[Row], when: str, called_before: bool) -> Iterator[Finding]:
    if not _mean(rows, "tools_offered"):
        return
    calls = sum(row.get("tool_calls_mean", 0.0) for row in rows)
    called = [row for row in rows if row.get("tool_calls_mean")]
    if not calls and called_before:
        yield Finding(
            "tools_unlearned",
            f"no rollout called a tool {when}, though earlier ones did: the reward can be had without. Reward what "
            "only the tools can give (a measure that looks at their results), or lower train.learning_rate.",
            ("train.learning_rate",),
        )
    elif not calls:
        yield Finding(
            "no_tool_calls",
            f"no rollout called a tool {when}: say in the instructions when to call which, show it in an example, or "
            "take a model that was trained to call tools.",
            ("model.name",),
        )
    elif _mean(called, "unknown_tool_rate") >= _WRONG_CALLS:
        yield Finding(
            "unknown_tools",
            f"{_mean(called, 'unknown_tool_rate'):.0%} of the tool calls {when} named a tool that does not exist; with "
            "rollout.constrain_tool_calls=true only existing ones can be named.",
            ("rollout.constrain_tool_calls",),
        )
    elif _mean(called, "tool_error_rate") >= _WRONG_CALLS:
        yield Finding(
            "tool_errors",
            f"{_mean(called, 'tool_error_rate'):.0%} of the tool calls {when} failed; a training keeps the tools' "
            "answers in rollouts.jsonl and evals/. If arguments are wrong, rollout.constrain_tool_calls=true helps.",
            ("rollout.constrain_tool_calls",),
        )


def _cut_off(rows: Sequence[Row], when: str) -> Iterator[Finding]:
    rate = _mean(rows, "truncation_rate")
    if rate <= _CUT_OFF_RATE:
        return
    share = f"{rate:.0%} of the rollouts {when} were cut off"
    if _mean(rows, "context_full_rate") > rate / 2:
        yield Finding(
            "context_full",
            f"{share} because the model's context (or its KV cache) was full: shorten prompts and tool results "
            "(rollout.max_tool_result_chars), allow fewer rounds (rollout.max_tool_rounds), or raise "
            "model.kv_memory_gib if the log says that it is too small.",
            ("rollout.max_tool_result_chars", "rollout.max_tool_rounds", "model.kv_memory_gib"),
        )
    elif _mean(rows, "looping_rate") > rate / 2:
        yield Finding(
            "looping",
            f"{share} while they repeated themselves: more tokens would not help. A higher rollout.temperature or a "
            "larger model may; a lower rollout.max_new_tokens loses less time.",
            ("rollout.temperature", "model.name", "rollout.max_new_tokens"),
        )
    else:
        yield Finding(
            "truncated",
            f"{share} by rollout.max_new_tokens; raise it, or ask for shorter answers.",
            ("rollout.max_new_tokens",),
        )


def _collapse(steps: Sequence[Row]) -> Iterator[Finding]:
    """Tool use, length or entropy that fell without a gain in the pass rate."""
    if len(steps) < 2 * MIN_STEPS:
        return
    first, last = steps[:MIN_STEPS], steps[-MIN_STEPS:]
    if _mean(last, "pass_rate") >= _mean(first, "pass_rate") + 0.05 or _mean(last, "pass_rate") > 0.9:
        return
    calls = [_mean(rows, "tool_calls_mean") for rows in (first, last)]
    if 0.0 < calls[1] < _COLLAPSE * calls[0]:
        yield Finding(
            "tool_collapse",
            f"tool calls fell from {calls[0]:.2g} to {calls[1]:.2g} a rollout without passing more often: something "
            "rewards doing without. Look at the measures, lower train.learning_rate, or raise rollout.temperature so "
            "that calls are tried again.",
            ("train.learning_rate", "rollout.temperature"),
        )
    lengths = [_mean(rows, "completion_length_mean") for rows in (first, last)]
    if lengths[1] < _COLLAPSE * lengths[0]:
        yield Finding(
            "short_answers",
            f"answers shrank from {lengths[0]:.0f} to {lengths[1]:.0f} tokens without passing more often: something "
            "rewards saying little. Look at the measures, or lower train.learning_rate.",
            ("train.learning_rate",),
        )
    entropies = [_mean(rows, "entropy") for rows in (first, last)]
    if 0.0 < entropies[1] < _COLLAPSE * entropies[0]:
        yield Finding(
            "entropy_collapse",
            f"the entropy fell from {entropies[0]:.2f} to {entropies[1]:.2f} nats a token, so hardly anything new is "
            "tried: lower train.learning_rate, or raise train.entropy_coefficient or rollout.temperature.",
            ("train.learning_rate", "train.entropy_coefficient", "rollout.temperature"),
        )


def _stale(rows: Sequence[Row], when: str) -> Iterator[Finding]:
    """Groups of older weights: dropped, or so old that the clipped loss ignores them."""
    dropped, taken = (sum(row.get(name, 0.0) for row in rows) for name in ("stale_groups_dropped", "groups"))
    if dropped > _DROPPED * (dropped + taken):
        yield Finding(
            "stale_groups",
            f"{dropped:.0f} of {dropped + taken:.0f} groups {when} were older than rollout.max_staleness allows and "
            "were thrown away: raise it, let fewer environments post at once, or learn from more groups a step "
            "(train.problems_per_step).",
            ("rollout.max_staleness", "train.problems_per_step"),
        )
    age, clipped = _mean(rows, "staleness_max"), _mean(rows, "clip_fraction_low") + _mean(rows, "clip_fraction_high")
    if age > _OLD or (age >= 1.0 and clipped > _CLIPPED):
        yield Finding(
            "staleness",
            f"{when} the oldest tokens were sampled {age:.1f} versions before the weights that learned from them, and "
            f"{clipped:.0%} of the tokens were clipped: lower rollout.max_staleness or train.learning_rate.",
            ("rollout.max_staleness", "train.learning_rate"),
        )


def _idle(rows: Sequence[Row], when: str) -> Iterator[Finding]:
    """A device that waits. Only a run that samples by its own engine knows when it computes."""
    timed = [row for row in rows if "decode_seconds" in row]
    waited = sum(row.get("agent_loop_seconds", 0.0) for row in timed)
    total = sum(row["sample_seconds"] + row["train_seconds"] for row in timed)
    if waited > _WAITING * total:
        yield Finding(
            "idle",
            f"the model stood idle for {waited / total:.0%} of the time {when}, while rollouts waited for tools, "
            "environments or measures: sample ahead with rollout.max_staleness=1 or 2, attempt more problems at once "
            "(train.problems_per_step), or make what they wait for faster.",
            ("rollout.max_staleness", "train.problems_per_step"),
        )


def _mean(rows: Sequence[Row], name: str) -> float:
    values = [row[name] for row in rows if name in row]
    return sum(values) / len(values) if values else 0.0
