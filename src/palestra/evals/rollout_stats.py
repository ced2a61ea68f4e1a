"""Statistics of rollouts, which training steps and evaluations report."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from palestra.core.types import Message, Rollout, Score, ToolResult

CallProblem = Literal["rejected_format", "malformed", "unknown_tool", "invalid_arguments", "raised"]
# metric of each problem: the share of all tool calls that have it
CALL_PROBLEM_RATES: dict[CallProblem, str] = {
    "rejected_format": "rejected_format_rate",
    "malformed": "malformed_call_rate",
    "unknown_tool": "unknown_tool_rate",
    "invalid_arguments": "invalid_argument_rate",
    "raised": "raised_call_rate",
}

_TAIL = 96  # tokens at the end of a rollout that are looked at for repetition
_NGRAM = 4
# what a model says that has learned to expect a hint, of `rollout.hints`
_HINTS = r"hint|worked example|successful attempt|earlier attempt|expected answer"
_HINT_PHRASE = re.compile(
    rf"\b(?:as|per|from|by|following|given|according to) (?:in )?the (?:{_HINTS})s?\b"
    rf"|\bthe (?:{_HINTS})s? (?:says?|shows?|is|are|was|gives?|tells?|states?|of this task)\b",
    re.IGNORECASE,
)


def rollout_stats(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Rewards, pass rates, lengths, tools and failures. Rollouts that failed are counted, and in no mean."""
    good = [r for r in rollouts if r.error is None]
    out = {
        "rollouts": float(len(rollouts)),
        "rollout_failures": float(len(rollouts) - len(good)),
        "measure_errors": float(sum(s.error for r in rollouts for s in r.scores.values())),
    }
    for name, scores in _scores(rollouts).items():
        if failed := sum(score.error for score in scores):
            out[f"measure_errors/{name}"] = float(failed)
    if not good:
        return out
    rewards = [r.reward for r in good]
    lengths = [r.sampled_tokens for r in good]
    out |= {
        "reward_mean": statistics.fmean(rewards),
        "reward_max": max(rewards),
        "reward_min": min(rewards),
        "reward_std": statistics.pstdev(rewards),
        "completion_length_mean": statistics.fmean(lengths),
        "completion_length_max": float(max(lengths)),
        "conversation_length_max": float(max(sum(len(turn.token_ids) for turn in r.turns) for r in good)),
        "sampled_tokens": float(sum(lengths)),
        "turns_mean": statistics.fmean(sum(turn.maker == "model" for turn in r.turns) for r in good),
        "truncation_rate": statistics.fmean(r.cut_off for r in good),
        "context_full_rate": statistics.fmean(r.stop == "context_full" for r in good),
        "looping_rate": statistics.fmean(r.cut_off and loops(r) for r in good),
    }
    if judged := [r for r in good if is_judged(r)]:
        out["pass_rate"] = statistics.fmean(r.passed for r in judged)
    out |= _tool_stats(good)
    for name, scores in _scores(good).items():
        if valid := [score for score in scores if not score.error]:
            out[f"score/{name}"] = statistics.fmean(score.value for score in valid)
        if verdicts := [score.passed for score in valid if score.passed is not None]:
            out[f"pass_rate/{name}"] = statistics.fmean(verdicts)
    return out


def is_judged(rollout: Rollout) -> bool:
    """Whether a measure decides that the rollout passed or failed."""
    return any(score.decides for score in rollout.scores.values())


def loops(rollout: Rollout) -> bool:
    """Whether what the model sampled last repeats itself."""
    turn = next((t for t in reversed(rollout.turns) if t.maker == "model"), None)
    tail = [] if turn is None else turn.token_ids[-_TAIL:].tolist()
    ngrams = list(zip(*(tail[i:] for i in range(_NGRAM)), strict=False))
    return len(tail) >= _TAIL // 4 and len(set(ngrams)) < len(ngrams) / 3


def call_problem(result: ToolResult, tool_names: Sequence[str]) -> CallProblem | None:
    """Why a tool call failed; None if it succeeded.

    `rejected_format`: it was written in another format than the model's own, and was not executed for that reason.
    """
    call = result.call
    if call.error is not None:
        return "rejected_format" if call.format else "malformed"
    if tool_names and call.name not in tool_names:
        return "unknown_tool"
    if result.ok:
        return None
    if result.raised:
        return "raised"
    return "invalid_arguments" if tool_names else "unknown_tool"


def called_successfully(rollout: Rollout) -> bool:
    """Whether at least one tool call of the rollout succeeded."""
    return any(call_problem(result, rollout.tool_names) is None for result in rollout.tool_results)


def has_unread_call(rollout: Rollout) -> bool:
    """Whether the model's text looks like a call of an offered tool, although no call was parsed."""
    if not rollout.tool_names or rollout.tool_results:
        return False
    messages = model_messages(rollout)
    looks_like_call = _call_pattern(rollout.tool_names)
    return not any(m.tool_calls for m in messages) and any(looks_like_call.search(m.text) for m in messages)


def has_unrun_call(rollout: Rollout) -> bool:
    """Whether calls were parsed and none was run: the attempt ended first."""
    calls = (call for message in model_messages(rollout) for call in message.tool_calls)
    return bool(rollout.tool_names) and not rollout.tool_results and any(calls)


def model_messages(rollout: Rollout) -> list[Message]:
    """The assistant messages that the model wrote, without those of examples in the prompt."""
    written = [message for message in rollout.messages if message.role == "assistant"]
    turns = sum(turn.maker == "model" for turn in rollout.turns)
    return written[-turns:] if turns else written


@lru_cache(64)
def _call_pattern(tool_names: tuple[str, ...]) -> re.Pattern[str]:
    """Finds `"name": "add"`, `<function=add` and a line that begins with `add(`."""
    names = f"(?:{'|'.join(map(re.escape, tool_names))})"
    return re.compile(rf"""["']name["']\s*:\s*["']{names}["']|<function={names}\b|^[ \t`]*{names}\(""", re.M)


def mentions_hint(rollout: Rollout) -> bool:
    """Whether the model speaks of a hint, which only a self-teacher is given."""
    return any(_HINT_PHRASE.search(message.text) for message in model_messages(rollout))


def leaks_hint(rollout: Rollout, expect: object) -> bool:
    """Whether the rollout shows signs of a hint: it speaks of one, or it had tools, and its last message contains the
    expected answer although neither the prompt nor a tool result did."""
    if mentions_hint(rollout):
        return True
    if not rollout.tool_names or isinstance(expect, bool) or not isinstance(expect, str | int | float):
        return False
    written, answer = model_messages(rollout), str(expect).strip()
    if not written or not answer or rollout.messages[-1] is not written[-1]:
        return False
    given = [m.text for m in rollout.messages if not any(m is own for own in written)]
    given += [result.content for result in rollout.tool_results]
    return _contains(written[-1].text, answer) and not any(_contains(text, answer) for text in given)


def _contains(text: str, answer: str) -> bool:
    """Whether a text has this answer as words of their own.

    >>> _contains("It is 1,250 in all.", "1250"), _contains("It is 12.", "1"), _contains("It is 1.5", "1")
    (True, False, False)
    """
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", text)
    return re.search(rf"(?<![\w.]){re.escape(answer)}(?!\w|\.\d)", plain, re.IGNORECASE) is not None


def _tool_stats(rollouts: Sequence[Rollout]) -> dict[str, float]:
    results = [(result, r.tool_names) for r in rollouts for result in r.tool_results]
    count = max(1, len(results))
    problems = Counter(call_problem(result, names) for result, names in results)
    return {
        "tools_offered": statistics.fmean(len(r.tool_names) for r in rollouts),
        "tool_calls_mean": len(results) / len(rollouts),
        "tool_error_rate": sum(not result.ok for result, _ in results) / count,
        "other_format_rate": sum(bool(result.call.format) for result, _ in results) / count,
        **{metric: problems[problem] / count for problem, metric in CALL_PROBLEM_RATES.items()},
        "repeated_call_rate": _repeated_call_rate(rollouts),
        "tool_limit_rate": statistics.fmean(r.stop == "tool_limit" for r in rollouts),
        "unread_call_rate": statistics.fmean(has_unread_call(r) for r in rollouts),
        "unrun_call_rate": statistics.fmean(has_unrun_call(r) for r in rollouts),
    }


def calls_of(rollout: Rollout) -> list[tuple[str, str]]:
    """Name and arguments of each call that the model wrote."""
    return [(call.name, repr(call.arguments)) for m in model_messages(rollout) for call in m.tool_calls]


def _repeated_call_rate(rollouts: Sequence[Rollout]) -> float:
    """Return the share of the calls that have the name and arguments of an earlier call of the same rollout."""
    total = distinct = 0
    for rollout in rollouts:
        calls = calls_of(rollout)
        total += len(calls)
        distinct += len(set(calls))
    return (total - distinct) / max(1, total)


def _scores(rollouts: Sequence[Rollout]) -> dict[str, list[Score]]:
    found: dict[str, list[Score]] = {}
    for rollout in rollouts:
        for name, score in rollout.scores.items():
            found.setdefault(name, []).append(score)
    return found
