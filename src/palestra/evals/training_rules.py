"""Rules about training: its signal, how rollouts change, and what the model waits for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from palestra.evals.evidence import (
    FAILED_CALLS,
    LOWER_RATE,
    MIN_STEPS,
    SOLVED,
    WORKED_EXAMPLE,
    Evidence,
    Finding,
    Remedy,
    Row,
    mean,
)

_MOSTLY_EQUAL = 0.75  # of the groups
_SMALL_UPDATE = 0.5  # of the learning rate
_COLLAPSE = 0.2  # of the value in the first steps
_FEWER_CALLS = 0.5  # of the value in the first steps
_GAIN = 0.05  # of a pass rate, or of the range of the rewards
_WAITING = 0.5  # of a step's time, in which the model computed nothing
_DROPPED = 0.2  # of the groups, for their age
_OLD = 4.0  # versions; one or two are usual
_CLIPPED = 0.2  # of the tokens
_WEAK = 0.1  # of the divergence of teacher and student; around 0 where they agree
_GAP, _GAP_GROWTH = 0.01, 3.0  # nats, and times the first step's
_LEAKED = 0.1  # of the rollouts, more than in the first steps

_EASIER = Remedy("start with easier cases")
_HARDER = Remedy("use harder cases")
_WARM_START = Remedy(
    "begin with --warm-start auto (stages.plan=auto), which first learns from those of many attempts with hints that "
    "pass",
    "stages.plan",
)
_PARTIAL = Remedy("give part of the score for partial progress (a measure with values between 0 and 1)")


def _signal(e: Evidence) -> Iterator[Finding]:
    """Groups whose rollouts all earned the same reward: in every group of most steps, or in most groups.

    Where a teacher was learned from, too, such groups are no loss.
    """
    steps = [row for row in (e.steps if e.ended else e.recent) if not row.get("tokens_distilled")]
    if not steps:
        return
    equal = [row for row in steps if row.get("equal_reward_groups") == 1.0]
    if len(equal) >= (max(1, len(steps) / 2) if e.ended else len(steps)):
        count = f"{len(equal)} of {len(steps)} steps" if e.ended else f"the last {len(equal)} steps"
        yield _no_signal(e, equal, count)
    elif e.mean("pass_rate") <= SOLVED:
        yield from _little_signal(e, steps)


def _no_signal(e: Evidence, rows: Sequence[Row], count: str) -> Finding:
    lowest, highest = min(row["reward_min"] for row in rows), max(row["reward_max"] for row in rows)
    failed = mean(rows, "tool_error_rate")
    if lowest > 0 and mean(rows, "tool_calls_mean") and failed >= FAILED_CALLS:
        return e.finding(
            "reward_for_failed_calls",
            f"in {count} all rollouts of a problem earned the same reward ({_range(lowest, highest)}) although "
            f"{failed:.0%} of the tool calls failed, so nothing was learned: the reward does not depend on the tools",
            Remedy("use a measure that gives no reward unless the tools' results are used"),
            example="reward_for_failed_calls",
        )
    if all(row.get("pass_rate") == 1.0 for row in rows):
        return e.finding(
            "solved",
            f"in {count} every rollout passed, so there was nothing left to learn",
            _HARDER,
            Remedy("end the run there with train.stop_when_solved", "train.stop_when_solved"),
            example="passed",
        )
    if lowest == highest == 0.0:
        return e.finding(
            "zero_reward",
            f"in {count} every rollout earned a reward of 0, which teaches nothing",
            _warm_start(e, rows),
            *_more_signal(e, e.steps),
            example="not_passed",
        )
    return e.finding(
        "equal_rewards",
        f"in {count} all rollouts of a problem earned the same reward ({_range(lowest, highest)}), which "
        "teaches nothing",
        _warm_start(e, rows),
        _PARTIAL,
        _larger_groups(e, e.steps),
        _warmer(e),
        example="not_passed",
    )


def _little_signal(e: Evidence, steps: Sequence[Row]) -> Iterator[Finding]:
    share, passed, failed = (mean(steps, name) for name in ("equal_reward_groups", "passed_groups", "failed_groups"))
    scales = [row["update_scale"] for row in steps if row.get("update_scale")]  # 0 where a step made no update
    scale = sum(scales) / len(scales) if scales else 1.0
    if share < _MOSTLY_EQUAL and scale >= _SMALL_UPDATE:
        return
    outcomes = f" (all passed in {passed:.0%}, none in {failed:.0%})" if passed + failed else ""
    scaled = f", and updates were scaled down to {scale:.0%} of the learning rate" if scale < _SMALL_UPDATE else ""
    yield e.finding(
        "low_signal" if scaled else "mostly_equal_rewards",
        f"in {share:.0%} of the groups all rollouts earned the same reward{outcomes}, so that these groups taught "
        f"nothing{scaled}",
        *([_HARDER] if passed > failed else _more_signal(e, steps)),
        example="passed" if passed > failed else "not_passed",
    )


def _more_signal(e: Evidence, steps: Sequence[Row]) -> tuple[Remedy | None, ...]:
    """Remedies for groups in which no rollout succeeds."""
    draw = Remedy("draw new problems until more groups differ (train.signal_share=1, slower)", "train.signal_share")
    some_differ = mean(steps, "equal_reward_groups") < 1.0  # else drawing is in vain
    return _EASIER, _PARTIAL, _larger_groups(e, steps), draw if some_differ else None


def _warm_start(e: Evidence, rows: Sequence[Row]) -> Remedy | None:
    """Learn from demonstrations first, where nothing has passed from the beginning."""
    never = all(row.get("pass_rate") == 0.0 for row in (*e.steps[:MIN_STEPS], *rows))
    return _WARM_START if never else None


def _larger_groups(e: Evidence, steps: Sequence[Row]) -> Remedy | None:
    """Larger groups contain both passes and failures more often, if there are any of both."""
    size, some_pass = e.facts.value("rollout.group_size"), 0.0 < mean(steps, "pass_rate") < 1.0
    text = f"raise rollout.group_size (now {size}), so that more groups differ"
    return Remedy(text, "rollout.group_size") if some_pass else None


def _warmer(e: Evidence) -> Remedy | None:
    """Rollouts at a higher temperature differ more; above 1 they are mostly noise."""
    now = e.facts.value("rollout.temperature")
    is_low = now is not None and now < 1.0
    return Remedy(f"raise rollout.temperature to 1 (now {now:g})", "rollout.temperature") if is_low else None


def _range(lowest: float, highest: float) -> str:
    return f"{lowest:.3g}" if lowest == highest else f"{lowest:.3g} to {highest:.3g}"


def _tool_use_fell(e: Evidence) -> Iterator[Finding]:
    """Tool calls fell without a gain: because guesses were rewarded, or for an unknown reason."""
    first, last = e.steps[:MIN_STEPS], e.steps[-MIN_STEPS:]
    if len(e.steps) < 2 * MIN_STEPS or not mean(first, "tool_calls_mean") or _passes_more(first, last):
        return
    before, after = (mean(rows, "tool_calls_mean") for rows in (first, last))
    rewarded, guesses = (
        sum(row.get(name, 0.0) for row in e.steps) for name in ("reinforced_rollouts", "reinforced_without_tools")
    )
    fell = f"tool calls fell from {before:.2g} to {after:.2g} per rollout, while the {_rates(first, last)}"
    if after < _FEWER_CALLS * before and rewarded >= 2 and guesses >= rewarded / 2:
        yield e.finding(
            "lucky_guesses",
            f"{fell}. {guesses:.0f} of the {rewarded:.0f} rollouts that earned more than others of their group had no "
            "successful tool call, so training rewarded guessing",
            Remedy("use a measure that gives no reward without the tools' results"),
            Remedy("start with cases that the model can solve with its tools"),
            WORKED_EXAMPLE,
            example="guess",
        )
    elif after < _COLLAPSE * before:
        yield e.finding("tool_collapse", fell, LOWER_RATE, example="no_call")


def _collapse(e: Evidence) -> Iterator[Finding]:
    """Length or entropy that fell without a gain."""
    first, last = e.steps[:MIN_STEPS], e.steps[-MIN_STEPS:]
    if len(e.steps) < 2 * MIN_STEPS or _passes_more(first, last) or _earns_more(first, last):
        return
    lengths = [mean(rows, "completion_length_mean") for rows in (first, last)]
    if lengths[1] < _COLLAPSE * lengths[0]:
        yield e.finding(
            "short_answers",
            f"answers shrank from {lengths[0]:.0f} to {lengths[1]:.0f} tokens, while the {_rates(first, last)}",
            LOWER_RATE,
            example="not_passed",
        )
    entropies = [mean(rows, "entropy") for rows in (first, last)]
    if 0.0 < entropies[1] < _COLLAPSE * entropies[0]:
        yield e.finding(
            "entropy_collapse",
            f"the entropy fell from {entropies[0]:.2f} to {entropies[1]:.2f} nats per token, so that hardly anything "
            f"new is tried, while the {_rates(first, last)}",
            LOWER_RATE,
            Remedy("raise train.entropy_coefficient", "train.entropy_coefficient"),
            _warmer(e),
            example="not_passed",
        )


def _passes_more(first: Sequence[Row], last: Sequence[Row]) -> bool:
    """Whether the pass rate rose, or the reward if no measure decides whether a rollout passed."""
    if not any("pass_rate" in row for row in last):
        return _earns_more(first, last)
    return mean(last, "pass_rate") >= mean(first, "pass_rate") + _GAIN or mean(last, "pass_rate") > SOLVED


def _earns_more(first: Sequence[Row], last: Sequence[Row]) -> bool:
    rows = [row for row in (*first, *last) if "reward_max" in row]
    if not rows:
        return False
    span = max(row["reward_max"] for row in rows) - min(row["reward_min"] for row in rows)
    return span > 0 and mean(last, "reward_mean") >= mean(first, "reward_mean") + _GAIN * span


def _rates(first: Sequence[Row], last: Sequence[Row]) -> str:
    if not any("pass_rate" in row for row in last):
        return f"mean reward went from {mean(first, 'reward_mean'):.3g} to {mean(last, 'reward_mean'):.3g}"
    return f"pass rate went from {mean(first, 'pass_rate'):.1%} to {mean(last, 'pass_rate'):.1%}"


def _hint_leak(e: Evidence) -> Iterator[Finding]:
    """Self-distillation taught the model to speak of a hint, or to give answers that no tool gave it."""
    before, after = (mean(rows, "hint_leak_rate") for rows in (e.steps[:MIN_STEPS], e.steps[-MIN_STEPS:]))
    if len(e.steps) < 2 * MIN_STEPS or after < before + _LEAKED:
        return
    chosen = e.facts.value("distill.context") or ()
    others = ",".join(name for name in chosen if name != "answer")
    answer = Remedy(f"leave the answer out of the hints (distill.context={others})", "distill.context")
    yield e.finding(
        "hint_leak",
        f"{after:.0%} of the rollouts in the last steps speak of the self-teacher's hint, or give the expected answer "
        f"although no tool result contains it, up from {before:.0%} in the first steps: the model imitates knowing the "
        "hint",
        answer if "answer" in chosen and others else None,
        Remedy("lower distill.coefficient", "distill.coefficient"),
        example="hint",
    )


def _weak_teacher(e: Evidence) -> Iterator[Finding]:
    """A teacher who likes failed rollouts at least as much as passed ones, as far as it differs from the student."""
    known = [row for row in e.recent if "teacher_gain" in row]
    gain = mean(known, "teacher_gain")
    if len(known) < MIN_STEPS or gain > -_WEAK * mean(known, "distill_divergence"):
        return
    name = e.facts.value("distill.teacher") or e.facts.value("distill.teacher_url")
    who = name or "the model with a hint"
    yield e.finding(
        "weak_teacher",
        f"{e.when} the teacher ({who}) did not prefer rollouts that passed to those that failed: it gave them "
        f"{gain:.2g} nats per token, compared with the student, so distillation teaches little or harms",
        Remedy("use another distill.teacher" if name else "name a better model as distill.teacher", "distill.teacher"),
        None if name else Remedy("try other hints with distill.context", "distill.context"),
        Remedy("set distill.coefficient to 0", "distill.coefficient"),
    )


def _stale(e: Evidence) -> Iterator[Finding]:
    """Groups of older weights: dropped, or so old that the clipped loss ignores them."""
    dropped, taken = e.total("stale_groups_dropped"), e.total("groups")
    limit = e.facts.value("rollout.max_staleness")
    if dropped > _DROPPED * (dropped + taken):
        yield e.finding(
            "stale_groups",
            f"{dropped:.0f} of {dropped + taken:.0f} groups {e.when} were dropped: they were older than "
            f"rollout.max_staleness{f'={limit}' if limit else ''} allows",
            Remedy("raise rollout.max_staleness", "rollout.max_staleness"),
            Remedy("let fewer environments post at the same time"),
            Remedy("learn from more groups per step (train.problems_per_step)", "train.problems_per_step"),
        )
    age, clipped = e.mean("staleness_max"), e.mean("clip_fraction_low") + e.mean("clip_fraction_high")
    if age > _OLD or (age >= 1.0 and clipped > _CLIPPED):
        younger = (
            f"lower rollout.max_staleness (now {limit})" if limit else "drop older groups: rollout.max_staleness=2"
        )
        yield e.finding(
            "staleness",
            f"{e.when} the oldest tokens were sampled {age:.1f} versions before the weights that learned from them, "
            f"and {clipped:.0%} of the tokens were clipped",
            Remedy(younger, "rollout.max_staleness") if limit or e.facts.kind == "wire" else None,
            LOWER_RATE,
        )


def _sampler_gap(e: Evidence) -> Iterator[Finding]:
    """A sampler and a learner that differ by more than rounding.

    Rounding makes a difference of about the same share of the entropy in every step. In the first step it is all there
    is: the weights are those that were loaded, and adapters add nothing yet.
    """
    fresh = [row for row in e.steps if not row.get("staleness_max")]
    known = [row for row in fresh if row.get("entropy") and "sampler_gap_mean" in row]
    if len(known) < MIN_STEPS or e.facts.value("rollout.constrain_tool_calls"):
        return
    first, recent = (mean(rows, "sampler_gap_mean") / mean(rows, "entropy") for rows in (known[:1], known[-MIN_STEPS:]))
    gap = mean(known[-MIN_STEPS:], "sampler_gap_mean")
    if gap > _GAP and recent > _GAP_GROWTH * first:
        yield e.finding(
            "sampler_gap",
            f"sampler and learner give the same tokens log-probabilities that differ by {gap:.2g} nats {e.when}, "
            f"{recent / first:.1f} times what rounding explained in the first step: the model is trained on tokens "
            "that it would sample differently",
            Remedy("compute both to the bit alike (model.exact=true)", "model.exact"),
            Remedy("set train.importance_correction=token_truncate", "train.importance_correction"),
        )


def _idle(e: Evidence) -> Iterator[Finding]:
    """A model that waits. Only a run that samples with its own engine knows when it computes."""
    timed = [row for row in e.recent if "decode_seconds" in row]
    waited = sum(row.get("agent_loop_seconds", 0.0) for row in timed)
    total = sum(row["sample_seconds"] + row["train_seconds"] for row in timed)
    if waited <= _WAITING * total:
        return
    idle = f"the model was idle for {waited / total:.0%} of the time {e.when}"
    if e.facts.kind == "wire":
        more = Remedy("start more environment processes, or make the environments faster")
        yield e.finding("idle", f"{idle}, waiting for environments to post", more)
        return
    ahead = Remedy("sample ahead with rollout.max_staleness=1 or 2", "rollout.max_staleness")
    yield e.finding(
        "idle",
        f"{idle}, while rollouts waited for tools, environments or measures",
        None if e.facts.value("rollout.max_staleness") else ahead,
        Remedy("attempt more problems at the same time (train.problems_per_step)", "train.problems_per_step"),
        Remedy("make what they wait for faster"),
    )


def _hung_calls(e: Evidence) -> Iterator[Finding]:
    if hung := e.recent[-1].get("hung_calls"):
        yield e.finding(
            "hung_calls",
            f"{hung:.0f} calls of tools or measures ran past their time limit and still hold a thread each",
            Remedy("give what they wait for a time limit of its own"),
            Remedy("make them async"),
        )


SIGNAL_RULES = (_signal,)
TREND_RULES = (_tool_use_fell, _collapse, _hint_leak, _weak_teacher, _stale, _sampler_gap, _idle, _hung_calls)
