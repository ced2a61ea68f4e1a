"""Findings: why a run learns little, each derived from its metrics, with an example rollout and settings to change.

In each row of `ROLLOUT_RULES` and `TRAINING_RULES` the first rule that holds makes findings: one cause leads to the
next. Texts are format strings over the values of a case and `e`, the `Evidence`: `e[metric]` is the mean of a metric
over the recent steps, `e.facts[setting]` the value of a setting. A remedy that names a setting changes it; one whose
setting has no effect in this kind of run is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

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
    mean,
    recorded_examples,
)
from palestra.evals.rollout_stats import (
    CALL_PROBLEM_RATES,
    LENGTH_CORRELATION,
    LENGTH_GROUPS,
    CallProblem,
    rollout_stats,
)

SOLVED = 0.9  # pass rate above which a run needs no explanation
FAILED_CALLS = 0.9  # share of failed tool calls from which tools count as broken for the model
COLLAPSE = 0.2  # of the value in the first steps
CUT_OFF = 0.3  # of the rollouts
MIN_GROUPS = 8  # of a judge; the mean correlation of as many groups without a preference is rarely above 0.5

Case = Mapping[str, Any]  # the values of one finding, for its texts
Cases = Callable[[Evidence], Iterable[Case]]  # one for each finding; none where the rule does not hold


class Rule(NamedTuple):
    """A kind of finding. `example` is the trait of the rollout that shows it."""

    kind: str
    cases: Cases
    text: str
    remedies: tuple[str, ...] = ()
    example: str = ""


def when(condition: Callable[[Evidence], object]) -> Cases:
    """The cases of a rule whose texts need no values of their own."""
    return lambda e: [{}] if condition(e) else []


EASIER, HARDER = "start with easier cases", "use harder cases"
PARTIAL = "give part of the score for partial progress (a measure with values between 0 and 1)"
LARGER_GROUPS = "raise rollout.group_size (now {e.facts[rollout.group_size]}), so that more groups differ"
DRAW_AGAIN = "draw new problems until more groups differ (train.signal_share=1, slower)"
WARM_START = (
    "begin with --warm-start auto (stages.plan=auto), which first learns from those of many attempts with hints that "
    "pass"
)
WARMER = "raise rollout.temperature to 1 (now {e.facts[rollout.temperature]:g})"
CONSTRAIN = "set rollout.constrain_tool_calls=true, which allows only calls that fit the tools"
WORKED_EXAMPLE = "show one call with its result in the instructions, and say when to call which tool"
MORE_ROUNDS, NO_ROUNDS = "raise rollout.max_tool_rounds", "raise rollout.max_tool_rounds (now 0)"
LOWER_RATE, UNDO_LOOPS = (
    "lower train.learning_rate",
    "lower train.learning_rate, since the repetition came with training",
)
MORE_TOKENS, OWN_LIMIT = "raise rollout.max_new_tokens{room}", "raise the environment's own limit"
NO_ANSWER_HINT = "leave the answer out of the hints (distill.context={others})"
OTHER_TEACHER, NAME_TEACHER = "use another distill.teacher", "name a better model as distill.teacher"
OTHER_HINTS = "try other hints with distill.context"
YOUNGER = "lower rollout.max_staleness (now {e.facts[rollout.max_staleness]})"
DROP_OLD = "drop older groups: rollout.max_staleness=2"
AHEAD = "sample ahead with rollout.max_staleness=1 or 2"


def has_room(e: Evidence) -> bool:
    return e.facts.context_tokens is None or e.longest < 0.95 * e.facts.context_tokens


def loops_more(e: Evidence) -> bool:
    """Whether training caused repetition."""
    return e.has_trend and mean(e.first, "looping_rate") < CUT_OFF / 2


# When a remedy helps; all others always do.
HELPS: dict[str, Callable[[Evidence], object]] = {
    WARM_START: lambda e: all(row.get("pass_rate") == 0.0 for row in (*e.steps[:MIN_STEPS], *e.equal)),
    LARGER_GROUPS: lambda e: 0.0 < mean(e.steps, "pass_rate") < 1.0,  # larger ones contain both more often
    DRAW_AGAIN: lambda e: mean(e.steps, "equal_reward_groups") < 1.0,
    WARMER: lambda e: e.facts["rollout.temperature"] < 1.0,  # above, rollouts are mostly noise
    CONSTRAIN: lambda e: not e.facts["rollout.constrain_tool_calls"],
    NO_ROUNDS: lambda e: e.facts["rollout.max_tool_rounds"] == 0,
    UNDO_LOOPS: loops_more,
    MORE_TOKENS: lambda e: e.facts.kind != "wire" and has_room(e),
    OWN_LIMIT: lambda e: e.facts.kind == "wire" and has_room(e),
    NO_ANSWER_HINT: lambda e: {"answer"} < set(e.facts["distill.context"]),
    OTHER_TEACHER: lambda e: e.teacher,
    NAME_TEACHER: lambda e: not e.teacher,
    OTHER_HINTS: lambda e: not e.teacher,
    YOUNGER: lambda e: e.facts["rollout.max_staleness"],
    DROP_OLD: lambda e: e.facts.kind == "wire" and not e.facts["rollout.max_staleness"],
    AHEAD: lambda e: not e.facts["rollout.max_staleness"],
}


def mostly_equal(e: Evidence, kind: str, *, easy: bool) -> Iterable[Case]:
    """Most groups have equal rewards, or updates are scaled down; `easy`: because rollouts pass."""
    if not e.learning or e["pass_rate"] > SOLVED:
        return
    share, passed, failed = (mean(e.learning, x) for x in ("equal_reward_groups", "passed_groups", "failed_groups"))
    scale = mean([row for row in e.learning if row.get("update_scale")], "update_scale") or 1.0  # 0: no update
    holds = scale < 0.5 if kind == "low_signal" else share >= 0.75
    if holds and easy == (passed > failed):
        outcomes = f" (all passed in {passed:.0%}, none in {failed:.0%})" if passed + failed else ""
        yield {"share": share, "outcomes": outcomes, "scale": scale}


def rewarded_failures(e: Evidence) -> Iterable[Case]:
    """Rewards are equal and above 0 although nearly all tool calls failed."""
    failed = mean(e.equal, "tool_error_rate") if mean(e.equal, "tool_calls_mean") else 0.0
    return [{"failed": failed}] if failed >= FAILED_CALLS and min(row["reward_min"] for row in e.equal) > 0 else []


def measure_errors(e: Evidence) -> Iterable[Case]:
    for name in dict.fromkeys(key for row in e.recent for key in row if key.startswith("measure_errors/")):
        yield {"name": name.partition("/")[2], "errors": e.total(name), "rollouts": e.total("rollouts")}


def failures(e: Evidence) -> Iterable[Case]:
    failed, rollouts = e.total("rollout_failures"), e.total("rollouts")
    return [{"failed": failed, "rollouts": rollouts}] if failed > 0.1 * rollouts else []


def needs_tools(e: Evidence) -> bool:
    return bool(e["tools_offered"]) and e["pass_rate"] <= SOLVED


def unread_calls(e: Evidence) -> bool:
    unread, others = e["unread_call_rate"], e["tool_calls_mean"] or e["unrun_call_rate"]
    return needs_tools(e) and (unread >= 0.3 or (unread > 0 and not others))


def failing_calls(e: Evidence, problem: CallProblem) -> Iterable[Case]:
    """Nearly all calls fail, most often by this problem."""
    called = [row for row in e.recent if row.get("tool_calls_mean")]
    failed, shares = mean(called, "tool_error_rate"), {p: mean(called, m) for p, m in CALL_PROBLEM_RATES.items()}
    if needs_tools(e) and failed >= FAILED_CALLS and shares[problem] and problem == max(shares, key=shares.__getitem__):
        causes = sorted(((share, p) for p, share in shares.items() if share >= 0.05), reverse=True)
        yield {"failed": failed, "causes": ", ".join(f"{share:.0%} {CALL_PROBLEMS[p][1]}" for share, p in causes)}


# of each problem of a call: the kind of its finding, its words, and its remedies
CALL_PROBLEMS: dict[CallProblem, tuple[str, str, tuple[str, ...]]] = {
    "rejected_format": ("rejected_format", "were written in another format than the model's own",
        ("execute such calls with rollout.unexpected_call_format=execute",)),
    "malformed": ("malformed_calls", "could not be parsed", (CONSTRAIN,)),
    "unknown_tool": ("unknown_tools", "named a tool that does not exist", (CONSTRAIN, WORKED_EXAMPLE)),
    "invalid_arguments": ("invalid_arguments", "had arguments that do not fit the tool", (CONSTRAIN, WORKED_EXAMPLE)),
    "raised": ("tool_errors", "raised an error in the tool",
        ("read the tool's message in the example, and fix the tool or its description",)),
}  # fmt: skip


def at_tool_limit(e: Evidence) -> Iterable[Case]:
    limit = e.facts.limit("rollout.max_tool_rounds", "the limit of tool rounds")
    return [{"limit": limit}] if e["tool_limit_rate"] > 0.5 and e["pass_rate"] <= SOLVED else []


def looping(e: Evidence) -> Iterable[Case]:
    since = f", up from {mean(e.first, 'looping_rate'):.0%} in the first steps" if loops_more(e) else ""
    return [{"since": since}] if e.is_cut_off_by("looping_rate", CUT_OFF) else []


def truncated(e: Evidence) -> Iterable[Case]:
    context, limit = e.facts.context_tokens, e.facts.limit("rollout.max_new_tokens", "the limit of new tokens")
    room = "" if context is None else f" (the longest conversation has {e.longest:.0f} of {context} tokens)"
    return [{"limit": limit, "room": room}] if e["truncation_rate"] > CUT_OFF else []


def length_preference(e: Evidence) -> Iterable[Case]:
    for metric in dict.fromkeys(key for row in e.recent for key in row if key.startswith(LENGTH_CORRELATION)):
        name = metric.removeprefix(LENGTH_CORRELATION)
        counts = [(row[metric], row.get(f"{LENGTH_GROUPS}{name}", 1.0)) for row in e.recent if metric in row]
        groups = sum(count for _, count in counts)
        correlation = sum(value * count for value, count in counts) / groups
        if groups >= MIN_GROUPS and correlation >= 0.5:
            yield {"name": name, "groups": groups, "correlation": correlation}


def fewer_calls(e: Evidence, least: float) -> Iterable[Case]:
    """Tool calls fell below a share of those in the first steps, without a gain."""
    before, after = mean(e.first, "tool_calls_mean"), mean(e.last, "tool_calls_mean")
    if e.has_trend and after < least * before and not e.passes_more(SOLVED):
        names = ("reinforced_rollouts", "reinforced_without_tools")
        rewarded, guesses = (sum(row.get(name, 0.0) for row in e.steps) for name in names)
        yield {"before": before, "after": after, "rewarded": rewarded, "guesses": guesses}


def lucky_guesses(e: Evidence) -> Iterable[Case]:
    return [case for case in fewer_calls(e, 0.5) if 2 <= case["rewarded"] <= 2 * case["guesses"]]


def collapse(e: Evidence, metric: str) -> Iterable[Case]:
    """A metric fell below a fifth of its value in the first steps, without a gain."""
    before, after = mean(e.first, metric), mean(e.last, metric)
    is_known = after > 0.0 or metric != "entropy"  # which not every learner measures
    if e.has_trend and is_known and after < COLLAPSE * before and not e.passes_more(SOLVED) and not e.earns_more:
        yield {"before": before, "after": after}


def hint_leak(e: Evidence) -> Iterable[Case]:
    before, after = mean(e.first, "hint_leak_rate"), mean(e.last, "hint_leak_rate")
    if e.has_trend and after >= before + 0.1:
        others = ",".join(name for name in e.facts["distill.context"] or () if name != "answer")
        yield {"before": before, "after": after, "others": others}


def weak_teacher(e: Evidence) -> Iterable[Case]:
    """A teacher who likes failed rollouts at least as much as passed ones, as far as it differs from the student."""
    known = [row for row in e.recent if "teacher_gain" in row]
    gain = mean(known, "teacher_gain")
    is_weak = len(known) >= MIN_STEPS and gain <= -0.1 * mean(known, "distill_divergence")
    return [{"gain": gain, "teacher": e.teacher or "the model with a hint"}] if is_weak else []


def stale_groups(e: Evidence) -> Iterable[Case]:
    dropped, limit = e.total("stale_groups_dropped"), e.facts["rollout.max_staleness"]
    drawn, text = dropped + e.total("groups"), f"={limit}" if limit else ""
    return [{"dropped": dropped, "drawn": drawn, "limit": text}] if dropped > 0.2 * drawn else []


def staleness(e: Evidence) -> Iterable[Case]:
    """Groups so old that the clipped loss ignores much of them; one or two versions are usual."""
    age, clipped = e["staleness_max"], e["clip_fraction_low"] + e["clip_fraction_high"]
    return [{"age": age, "clipped": clipped}] if age > 4.0 or (age >= 1.0 and clipped > 0.2) else []


def sampler_gap(e: Evidence) -> Iterable[Case]:
    """Sampler and learner differ by more than rounding.

    Rounding makes a difference of about the same share of the entropy in every step. In the first step it is all there
    is: the weights are those that were loaded, and adapters add nothing yet.
    """
    fresh = [row for row in e.steps if not row.get("staleness_max")]
    known = [row for row in fresh if row.get("entropy") and "sampler_gap_mean" in row]
    if len(known) < MIN_STEPS or e.facts["rollout.constrain_tool_calls"]:
        return
    first, recent = (mean(rows, "sampler_gap_mean") / mean(rows, "entropy") for rows in (known[:1], known[-MIN_STEPS:]))
    gap = mean(known[-MIN_STEPS:], "sampler_gap_mean")
    if gap > 0.01 and recent > 3.0 * first:
        yield {"gap": gap, "growth": recent / max(first, 1e-3)}


def idle(e: Evidence, *, wire: bool) -> Iterable[Case]:
    """Only a run that samples with its own engine knows when the model computes."""
    timed = [row for row in e.recent if "decode_seconds" in row]
    waited = sum(row.get("agent_loop_seconds", 0.0) for row in timed)
    seconds = sum(row["sample_seconds"] + row["train_seconds"] for row in timed)
    return [{"share": waited / seconds}] if waited > 0.5 * seconds and wire == (e.facts.kind == "wire") else []


MORE_SIGNAL = (EASIER, PARTIAL, LARGER_GROUPS, DRAW_AGAIN)
EQUAL = "in {e.equal_count} all rollouts of a problem earned the same reward ({e.equal_rewards})"
MOSTLY_EQUAL = (
    "in {share:.0%} of the groups all rollouts earned the same reward{outcomes}, so that these groups taught nothing"
)
SCALED = ", and updates were scaled down to {scale:.0%} of the learning rate"
UNTIL_LIMIT = "{e[tool_limit_rate]:.0%} of the rollouts {e.when} called tools until {limit} and gave no answer"
CUT = "{e[truncation_rate]:.0%} of the rollouts {e.when} were cut off "

# fmt: off
ROLLOUT_RULES: tuple[tuple[Rule, ...], ...] = (
    (Rule("measure_errors", measure_errors,
        "the measure {name} raised an error in {errors:.0f} of {rollouts:.0f} rollouts {e.when}; these are left out",
        example="measure_error"),),
    (Rule("rollout_failures", failures,
        "{failed:.0f} of {rollouts:.0f} rollouts {e.when} failed with an error", example="failure"),),
    (
        Rule("unread_calls", when(unread_calls),
            "{e[unread_call_rate]:.0%} of the rollouts {e.when} wrote text that looks like a tool call, in a format "
            "that could not be parsed, so that no tool was called",
            ("use a model that writes calls in the format of its chat template (model.name)",), "unread_call"),
        *(Rule(kind, partial(failing_calls, problem=problem),
            "{failed:.0%} of the tool calls {e.when} failed: {causes}", remedies, problem)
            for problem, (kind, _, remedies) in CALL_PROBLEMS.items()),
        Rule("unrun_calls", when(lambda e: needs_tools(e) and e["unrun_call_rate"] and not e["tool_calls_mean"]),
            "{e[unrun_call_rate]:.0%} of the rollouts {e.when} wrote tool calls, but none was run: the attempts ended "
            "first, by the limit of tool rounds or turns, or because they were cut off", (NO_ROUNDS,), "unrun_call"),
        Rule("no_tool_calls", when(lambda e: needs_tools(e) and not any(r.get("tool_calls_mean") for r in e.steps)),
            "no rollout {e.when} called a tool, in any format",
            (WORKED_EXAMPLE, "use a model that was trained to call tools (model.name)"), "no_call"),
    ),
    (
        Rule("repeated_calls", lambda e: at_tool_limit(e) if e["repeated_call_rate"] > 0.3 else (),
            UNTIL_LIMIT + "; {e[repeated_call_rate]:.0%} of all calls repeat an earlier one of the same rollout, so "
            "more rounds would not help", (WORKED_EXAMPLE,), "tool_limit"),
        Rule("tool_limit", at_tool_limit, UNTIL_LIMIT, (MORE_ROUNDS,), "tool_limit"),
    ),
    (
        Rule("context_full", when(lambda e: e.is_cut_off_by("context_full_rate", CUT_OFF)),
            CUT + "because the model's context (or its KV cache) was full",
            ("shorten the prompts", "shorten tool results (rollout.max_tool_result_chars)",
             "allow fewer rounds (rollout.max_tool_rounds)",
             "raise model.kv_memory_gib, if the log says that it is too small"), "context_full"),
        Rule("looping", looping, CUT + "while they repeated themselves{since}; more tokens would not help",
            (UNDO_LOOPS, "lower rollout.max_new_tokens, so that less time is lost"), "looping"),
        Rule("truncated", truncated, CUT + "by {limit}",
            (OWN_LIMIT, MORE_TOKENS, "ask for shorter answers"), "truncated"),
    ),
    (Rule("length_preference", length_preference,
        "the judge {name} prefers long answers: within a group its scores and the length of the answers correlate by "
        "{correlation:.2f} (mean of {groups:.0f} groups {e.when}), so the model learns to write more",
        ("say in the rubric that length is no merit, and what a short good answer looks like",
         "compare the judge with labels of your own: examples/judge_agreement.py",
         "add a measure of length, with a negative or a zero weight")),),
)
TRAINING_RULES: tuple[tuple[Rule, ...], ...] = (
    (
        Rule("reward_for_failed_calls", rewarded_failures,
            EQUAL + " although {failed:.0%} of the tool calls failed, so nothing was learned: the reward does "
            "not depend on the tools", ("use a measure that gives no reward unless the tools' results are used",),
            "reward_for_failed_calls"),
        Rule("solved", when(lambda e: e.equal and all(row.get("pass_rate") == 1.0 for row in e.equal)),
            "in {e.equal_count} every rollout passed, so there was nothing left to learn",
            (HARDER, "end the run there with train.stop_when_solved"), "passed"),
        Rule("zero_reward", when(lambda e: e.equal and not any(r["reward_min"] or r["reward_max"] for r in e.equal)),
            "in {e.equal_count} every rollout earned a reward of 0, which teaches nothing",
            (WARM_START, *MORE_SIGNAL), "not_passed"),
        Rule("equal_rewards", when(lambda e: e.equal), EQUAL + ", which teaches nothing",
            (WARM_START, PARTIAL, LARGER_GROUPS, WARMER), "not_passed"),
        *(Rule(kind, partial(mostly_equal, kind=kind, easy=easy), MOSTLY_EQUAL + more,
            (HARDER,) if easy else MORE_SIGNAL, "passed" if easy else "not_passed")
            for kind, more in {"low_signal": SCALED, "mostly_equal_rewards": ""}.items() for easy in (True, False)),
    ),
    *ROLLOUT_RULES,
    (
        Rule("lucky_guesses", lucky_guesses,
            "tool calls fell from {before:.2g} to {after:.2g} per rollout, while the {e.change}. {guesses:.0f} of the "
            "{rewarded:.0f} rollouts that earned more than others of their group had no successful tool call, so "
            "training rewarded guessing",
            ("use a measure that gives no reward without the tools' results",
             "start with cases that the model can solve with its tools", WORKED_EXAMPLE), "guess"),
        Rule("tool_collapse", partial(fewer_calls, least=COLLAPSE),
            "tool calls fell from {before:.2g} to {after:.2g} per rollout, while the {e.change}",
            (LOWER_RATE,), "no_call"),
    ),
    (Rule("short_answers", partial(collapse, metric="completion_length_mean"),
        "answers shrank from {before:.0f} to {after:.0f} tokens, while the {e.change}", (LOWER_RATE,), "not_passed"),),
    (Rule("entropy_collapse", partial(collapse, metric="entropy"),
        "the entropy fell from {before:.2f} to {after:.2f} nats per token, so that hardly anything new is tried, while "
        "the {e.change}", (LOWER_RATE, "raise train.entropy_coefficient", WARMER), "not_passed"),),
    (Rule("hint_leak", hint_leak,
        "{after:.0%} of the rollouts in the last steps speak of the self-teacher's hint, or give the expected answer "
        "although no tool result contains it, up from {before:.0%} in the first steps: the model imitates knowing the "
        "hint", (NO_ANSWER_HINT, "lower distill.coefficient"), "hint"),),
    (Rule("weak_teacher", weak_teacher,
        "{e.when} the teacher ({teacher}) did not prefer rollouts that passed to those that failed: it gave them "
        "{gain:.2g} nats per token, compared with the student, so distillation teaches little or harms",
        (OTHER_TEACHER, NAME_TEACHER, OTHER_HINTS, "set distill.coefficient to 0")),),
    (Rule("stale_groups", stale_groups,
        "{dropped:.0f} of {drawn:.0f} groups {e.when} were dropped: they were older than rollout.max_staleness{limit} "
        "allows",
        ("raise rollout.max_staleness", "let fewer environments post at the same time",
         "learn from more groups per step (train.problems_per_step)")),),
    (Rule("staleness", staleness,
        "{e.when} the oldest tokens were sampled {age:.1f} versions before the weights that learned from them, and "
        "{clipped:.0%} of the tokens were clipped", (YOUNGER, DROP_OLD, LOWER_RATE)),),
    (Rule("sampler_gap", sampler_gap,
        "sampler and learner give the same tokens log-probabilities that differ by {gap:.2g} nats {e.when}, "
        "{growth:.1f} times what rounding explained in the first step: the model is trained on tokens that it would "
        "sample differently",
        ("compute both to the bit alike (model.exact=true)", "set train.importance_correction=token_truncate")),),
    (
        Rule("idle", partial(idle, wire=True),
            "the model was idle for {share:.0%} of the time {e.when}, waiting for environments to post",
            ("start more environment processes, or make the environments faster",)),
        Rule("idle", partial(idle, wire=False),
            "the model was idle for {share:.0%} of the time {e.when}, while rollouts waited for tools, environments or "
            "measures",
            (AHEAD, "attempt more problems at the same time (train.problems_per_step)",
             "make what they wait for faster")),
    ),
    (Rule("hung_calls", lambda e: [{"hung": hung}] if (hung := e.recent[-1].get("hung_calls")) else (),
        "{hung:.0f} calls of tools or measures ran past their time limit and still hold a thread "
        "each", ("give what they wait for a time limit of its own", "make them async")),),
)
# fmt: on


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
