"""Rules about rollouts, in training steps and evaluations: failures, tool calls, and rollouts that were cut off."""

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
from palestra.evals.judge_stats import LENGTH_CORRELATION, LENGTH_GROUPS
from palestra.evals.rollout_stats import CALL_PROBLEM_RATES, CallProblem

_AT_TOOL_LIMIT = 0.5  # of the rollouts
_REPEATED_CALLS = 0.3  # of the calls
_CUT_OFF_RATE = 0.3
_FAILURE_RATE = 0.1
_UNREAD_CALLS = 0.3  # of the rollouts
_LENGTH_CORRELATION = 0.5  # of a judge's scores and the length of the answers
_MIN_GROUPS = 8  # by which that is told; the mean of as many without preference is rarely above 0.5


def _failures(e: Evidence) -> Iterator[Finding]:
    count, failed = e.total("rollouts"), e.total("rollout_failures")
    for name in dict.fromkeys(key for row in e.recent for key in row if key.startswith("measure_errors/")):
        yield e.finding(
            "measure_errors",
            f"the measure {name.partition('/')[2]} raised an error in {e.total(name):.0f} of {count:.0f} rollouts "
            f"{e.when}; these are left out",
            example="measure_error",
        )
    if failed > _FAILURE_RATE * count:
        yield e.finding(
            "rollout_failures", f"{failed:.0f} of {count:.0f} rollouts {e.when} failed with an error", example="failure"
        )


def _tools(e: Evidence) -> Iterator[Finding]:
    """Calls that are missing, that are not run, or that fail. Only one of them, since one leads to the next."""
    if not e.mean("tools_offered") or e.mean("pass_rate") > SOLVED:
        return
    called = [row for row in e.recent if row.get("tool_calls_mean")]
    unread, unrun = e.mean("unread_call_rate"), e.mean("unrun_call_rate")
    if unread >= _UNREAD_CALLS or (unread and not called and not unrun):
        yield e.finding(
            "unread_calls",
            f"{unread:.0%} of the rollouts {e.when} wrote text that looks like a tool call, in a format that could not "
            "be parsed, so that no tool was called",
            Remedy("use a model that writes calls in the format of its chat template (model.name)", "model.name"),
            example="unread_call",
        )
    elif called:
        yield from _failed_calls(e, called)
    elif unrun:
        rounds = Remedy("raise rollout.max_tool_rounds (now 0)", "rollout.max_tool_rounds")
        yield e.finding(
            "unrun_calls",
            f"{unrun:.0%} of the rollouts {e.when} wrote tool calls, but none was run: the attempts ended first, by "
            "the limit of tool rounds or turns, or because they were cut off",
            rounds if e.facts.value("rollout.max_tool_rounds") == 0 else None,
            example="unrun_call",
        )
    elif not any(row.get("tool_calls_mean") for row in e.steps):
        yield e.finding(
            "no_tool_calls",
            f"no rollout {e.when} called a tool, in any format",
            WORKED_EXAMPLE,
            Remedy("use a model that was trained to call tools (model.name)", "model.name"),
            example="no_call",
        )


# of each problem: the kind of its finding, and its words
_PROBLEMS: dict[CallProblem, tuple[str, str]] = {
    "rejected_format": ("rejected_format", "were written in another format than the model's own"),
    "malformed": ("malformed_calls", "could not be parsed"),
    "unknown_tool": ("unknown_tools", "named a tool that does not exist"),
    "invalid_arguments": ("invalid_arguments", "had arguments that do not fit the tool"),
    "raised": ("tool_errors", "raised an error in the tool"),
}


def _failed_calls(e: Evidence, called: Sequence[Row]) -> Iterator[Finding]:
    """Nearly all calls fail. The finding is of the most frequent cause."""
    failed = mean(called, "tool_error_rate")
    shares = {problem: mean(called, metric) for problem, metric in CALL_PROBLEM_RATES.items()}
    main = max(shares, key=lambda problem: shares[problem])
    if failed < FAILED_CALLS or not shares[main]:
        return
    causes = sorted(((share, problem) for problem, share in shares.items() if share >= 0.05), reverse=True)
    listed = ", ".join(f"{share:.0%} {_PROBLEMS[problem][1]}" for share, problem in causes)
    yield e.finding(
        _PROBLEMS[main][0],
        f"{failed:.0%} of the tool calls {e.when} failed: {listed}",
        *_call_remedies(e, main),
        example=main,
    )


def _call_remedies(e: Evidence, problem: CallProblem) -> tuple[Remedy | None, ...]:
    text = "set rollout.constrain_tool_calls=true, which allows only calls that fit the tools"
    remedy = Remedy(text, "rollout.constrain_tool_calls")
    constrain = None if e.facts.value(remedy.setting) else remedy
    match problem:
        case "rejected_format":
            execute = "execute such calls with rollout.unexpected_call_format=execute"
            return (Remedy(execute, "rollout.unexpected_call_format"),)
        case "malformed":
            return (constrain,)
        case "unknown_tool" | "invalid_arguments":
            return constrain, WORKED_EXAMPLE
    return (Remedy("read the tool's message in the example, and fix the tool or its description"),)


def _tool_limit(e: Evidence) -> Iterator[Finding]:
    """Rollouts that call tools until the limit of rounds, so that they never answer."""
    rate, repeated = e.mean("tool_limit_rate"), e.mean("repeated_call_rate")
    if rate <= _AT_TOOL_LIMIT or e.mean("pass_rate") > SOLVED:
        return
    rounds = e.facts.value("rollout.max_tool_rounds")
    known = rounds is not None and e.facts.allows("rollout.max_tool_rounds")
    limit = f"rollout.max_tool_rounds={rounds}" if known else "the limit of tool rounds"
    ended = f"{rate:.0%} of the rollouts {e.when} called tools until {limit} and gave no answer"
    if repeated > _REPEATED_CALLS:
        yield e.finding(
            "repeated_calls",
            f"{ended}; {repeated:.0%} of all calls repeat an earlier one of the same rollout, so more rounds would not "
            "help",
            WORKED_EXAMPLE,
            example="tool_limit",
        )
    else:
        more = Remedy("raise rollout.max_tool_rounds", "rollout.max_tool_rounds")
        yield e.finding("tool_limit", ended, more, example="tool_limit")


def _cut_off(e: Evidence) -> Iterator[Finding]:
    rate = e.mean("truncation_rate")
    if rate <= _CUT_OFF_RATE:
        return
    share = f"{rate:.0%} of the rollouts {e.when} were cut off"
    if e.mean("context_full_rate") > rate / 2:
        yield e.finding(
            "context_full",
            f"{share} because the model's context (or its KV cache) was full",
            Remedy("shorten the prompts"),
            Remedy("shorten tool results (rollout.max_tool_result_chars)", "rollout.max_tool_result_chars"),
            Remedy("allow fewer rounds (rollout.max_tool_rounds)", "rollout.max_tool_rounds"),
            Remedy("raise model.kv_memory_gib, if the log says that it is too small", "model.kv_memory_gib"),
            example="context_full",
        )
    elif e.mean("looping_rate") > rate / 2:
        yield _looping(e, share)
    else:
        yield e.finding(
            "truncated",
            f"{share} by {_token_limit(e)}",
            _longer(e),
            Remedy("ask for shorter answers"),
            example="truncated",
        )


def _token_limit(e: Evidence) -> str:
    limit = e.facts.value("rollout.max_new_tokens")
    known = limit is not None and e.facts.allows("rollout.max_new_tokens")
    return f"rollout.max_new_tokens={limit}" if known else "the limit of new tokens"


def _longer(e: Evidence) -> Remedy | None:
    """Recommend more tokens, unless the context is full."""
    longest, context = max(row.get("conversation_length_max", 0.0) for row in e.recent), e.facts.context_tokens
    if context is not None and longest >= 0.95 * context:
        return None
    if e.facts.kind == "wire":
        return Remedy("raise the environment's own limit")
    room = "" if context is None else f" (the longest conversation has {longest:.0f} of {context} tokens)"
    return Remedy(f"raise rollout.max_new_tokens{room}", "rollout.max_new_tokens")


def _looping(e: Evidence, share: str) -> Finding:
    """Repetition that training caused has another remedy than one that was there from the start."""
    began = mean(e.steps[:MIN_STEPS], "looping_rate")
    caused = len(e.steps) >= 2 * MIN_STEPS and began < _CUT_OFF_RATE / 2
    since = f", up from {began:.0%} in the first steps" if caused else ""
    return e.finding(
        "looping",
        f"{share} while they repeated themselves{since}; more tokens would not help",
        LOWER_RATE if caused else None,
        Remedy("lower rollout.max_new_tokens, so that less time is lost", "rollout.max_new_tokens"),
        example="looping",
    )


def _length_preference(e: Evidence) -> Iterator[Finding]:
    """Judges that score long answers higher than the short ones of the same group."""
    for metric in dict.fromkeys(key for row in e.recent for key in row if key.startswith(LENGTH_CORRELATION)):
        name = metric.removeprefix(LENGTH_CORRELATION)
        counts = [(row[metric], row.get(f"{LENGTH_GROUPS}{name}", 1.0)) for row in e.recent if metric in row]
        groups = sum(count for _, count in counts)
        found = sum(value * count for value, count in counts) / groups
        if groups >= _MIN_GROUPS and found >= _LENGTH_CORRELATION:
            yield e.finding(
                "length_preference",
                f"the judge {name} prefers long answers: within a group its scores and the length of the answers "
                f"correlate by {found:.2f} (mean of {groups:.0f} groups {e.when}), so the model learns to write more",
                Remedy("say in the rubric that length is no merit, and what a short good answer looks like"),
                Remedy("compare the judge with labels of your own: palestra judge-check labels.jsonl"),
                Remedy("add a measure of length, with a negative or a zero weight"),
            )


ROLLOUT_RULES = (_failures, _tools, _tool_limit, _cut_off, _length_preference)
