"""Statistics of rollouts, which training steps and evaluations report, and example rollouts for findings."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from statistics import fmean, pstdev
from typing import Any, Literal

from palestra.core.messages import show_call
from palestra.core.types import CUT_OFF, Message, Rollout, ToolResult

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
_MAX_CHARS = 200  # of the text of an example
# what a model says that has learned to expect a hint, of `rollout.hints`
_HINTS = r"hint|worked example|successful attempt|earlier attempt|expected answer"
_HINT_PHRASE = re.compile(
    rf"\b(?:as|per|from|by|following|given|according to) (?:in )?the (?:{_HINTS})s?\b"
    rf"|\bthe (?:{_HINTS})s? (?:says?|shows?|is|are|was|gives?|tells?|states?|of this task)\b",
    re.IGNORECASE,
)


def rollout_stats(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Rewards, pass rates, lengths, tools and failures. Rollouts that failed are counted, and in no mean."""
    columns: dict[str, list[float]] = {}  # the numbers of the rollouts that did not fail
    errors, problems = Counter[str](), Counter[CallProblem | None]()
    values: dict[str, list[float]] = {}  # of each measure
    verdicts: dict[str, list[bool]] = {}
    passed: list[bool] = []
    results = failed = foreign = written = repeated = 0  # calls
    for rollout in rollouts:
        for name, score in rollout.scores.items():
            if score.error:
                errors[name] += 1
            elif rollout.error is None:
                values.setdefault(name, []).append(score.value)
                if score.passed is not None:
                    verdicts.setdefault(name, []).append(score.passed)
        if rollout.error is not None:
            continue
        for name, number in numbers_of(rollout).items():
            columns.setdefault(name, []).append(number)
        for result in rollout.tool_results:
            results += 1
            failed += not result.ok
            foreign += bool(result.call.format)
            problems[call_problem(result, rollout.tool_names)] += 1
        calls = calls_of(rollout)
        written += len(calls)
        repeated += len(calls) - len(set(calls))  # the name and arguments of an earlier one
        if (verdict := rollout.verdict) is not None:
            passed.append(verdict)
    rewards = columns.pop("reward", [])
    out = {
        "rollouts": float(len(rollouts)),
        "rollout_failures": float(len(rollouts) - len(rewards)),
        "measure_errors": float(errors.total()),
    }
    for name, count in errors.items():
        out[f"measure_errors/{name}"] = float(count)
    if not rewards:
        return out
    lengths = columns.pop("completion_length")
    out |= {
        "reward_mean": fmean(rewards),
        "reward_max": max(rewards),
        "reward_min": min(rewards),
        "reward_std": pstdev(rewards),
        "completion_length_mean": fmean(lengths),
        "completion_length_max": float(max(lengths)),
        "conversation_length_max": float(max(columns.pop("conversation_length"))),
        "sampled_tokens": float(sum(lengths)),
    }
    for name, numbers in columns.items():
        out[name] = fmean(numbers)
    out["tool_error_rate"] = failed / max(1, results)
    out["other_format_rate"] = foreign / max(1, results)
    out["repeated_call_rate"] = repeated / max(1, written)
    for problem, metric in CALL_PROBLEM_RATES.items():
        out[metric] = problems[problem] / max(1, results)
    if passed:
        out["pass_rate"] = fmean(passed)
    for name, of_measure in values.items():
        out[f"score/{name}"] = fmean(of_measure)
        if name in verdicts:
            out[f"pass_rate/{name}"] = fmean(verdicts[name])
    return out


def numbers_of(rollout: Rollout) -> dict[str, float]:
    """The numbers of one rollout; a step reports the mean of each by its name, from `turns_mean` on."""
    turns = size = 0
    for turn in rollout.turns:
        turns += turn.maker == "model"
        size += len(turn.token_ids)
    is_cut_off = rollout.stop in CUT_OFF
    runs_none = bool(rollout.tool_names) and not rollout.tool_results
    return {
        "reward": rollout.reward,
        "completion_length": rollout.sampled_tokens,
        "conversation_length": size,
        "turns_mean": turns,
        "truncation_rate": is_cut_off,
        "context_full_rate": rollout.stop == "context_full",
        "looping_rate": is_cut_off and loops(rollout),
        "tools_offered": len(rollout.tool_names),
        "tool_calls_mean": len(rollout.tool_results),
        "tool_limit_rate": rollout.stop == "tool_limit",
        "unread_call_rate": has_unread_call(rollout),
        "unrun_call_rate": runs_none and bool(calls_of(rollout)),  # the attempt ended before the calls were run
    }


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


def model_messages(rollout: Rollout) -> list[Message]:
    """The assistant messages that the model wrote, without those of examples in the prompt."""
    written = [message for message in rollout.messages if message.role == "assistant"]
    turns = 0
    for turn in rollout.turns:
        turns += turn.maker == "model"
    return written[-turns:] if turns else written


def calls_of(rollout: Rollout) -> list[tuple[str, str]]:
    """Name and arguments of each call that the model wrote."""
    return [(call.name, repr(call.arguments)) for m in model_messages(rollout) for call in m.tool_calls]


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


@dataclass(frozen=True, slots=True)
class Example:
    """A rollout that shows a finding.

    `source` is "train" (rollouts.jsonl), "before" or "after" (evals/), or "" for one that is not on disk. `index`
    counts from 0, in its file or, for training, among the rollouts of its step.
    """

    source: str
    step: int
    index: int
    problem_id: str
    text: str

    @property
    def location(self) -> str:
        if self.source == "train":
            return f"rollouts.jsonl, step {self.step}, rollout {self.index}"
        if self.source:
            return f"evals/{self.source}.jsonl, line {self.index + 1}"
        return f"problem {self.problem_id}"

    def __str__(self) -> str:
        return f"Example ({self.location}): {self.text}" if self.text else f"Example: {self.location}."

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"location": self.location}


def find_examples(rollouts: Iterable[Rollout], source: str = "", step: int = 0) -> dict[str, Example]:
    """The first rollout with each trait, by the name of the trait."""
    examples: dict[str, Example] = {}
    for index, rollout in enumerate(rollouts):
        for trait, text in traits_of(rollout).items():
            if trait not in examples:
                text = last_words(rollout) if text is None else text
                line = " ".join(text[: 4 * _MAX_CHARS].split())
                line = line if len(line) <= _MAX_CHARS else line[: _MAX_CHARS - 1] + "…"
                examples[trait] = Example(source, step, index, rollout.problem_id, line)
    return examples


def traits_of(rollout: Rollout) -> dict[str, str | None]:
    """The traits that findings show, each with the text that shows it; None is for the model's last words."""
    traits: dict[str, str | None] = {}
    for name, score in rollout.scores.items():
        if score.error:
            traits.setdefault("measure_error", f"{name}: {score.reason}")
    for result in rollout.tool_results:
        problem = call_problem(result, rollout.tool_names)
        if problem is not None and problem not in traits:
            said = result.content or result.call.error
            traits[problem] = f"{show_call(result.call)} → {said}" if said else show_call(result.call)
    if rollout.error is not None:
        return traits | {"failure": rollout.error}
    numbers, earns_uncalled = numbers_of(rollout), rollout.reward > 0 and not called_successfully(rollout)
    rates = ("unread_call", "unrun_call", "context_full", "looping", "tool_limit")
    shown = {trait: numbers[f"{trait}_rate"] for trait in rates} | {
        "no_call": rollout.tool_names and not rollout.tool_results,
        "truncated": rollout.stop == "truncated" and not numbers["looping_rate"],
        "guess": rollout.tool_names and earns_uncalled,
        "reward_for_failed_calls": rollout.tool_results and earns_uncalled,
        "hint": mentions_hint(rollout),
        "passed": rollout.passed,
        "not_passed": not rollout.passed,
    }
    return traits | {trait: None for trait, holds in shown.items() if holds}


def last_words(rollout: Rollout) -> str:
    """The last text or tool calls of the model."""
    for message in reversed(model_messages(rollout)):
        parts = [message.text] if message.text else []
        if message.tool_calls:
            parts.append(", ".join(map(show_call, message.tool_calls)))
        if parts:
            return " ".join(parts)
    return ""


LENGTH_CORRELATION = "judge/length_correlation/"  # + measure: mean over the groups in which both differ
LENGTH_GROUPS = "judge/length_groups/"  # + measure: how many groups those are


def is_total(metric: str) -> bool:
    """Whether a metric of groups is added up over a step, as calls and costs are, rather than averaged.

    >>> is_total("judge/calls"), is_total("judge/length_correlation/ruler"), is_total("agent/requests_per_attempt")
    (True, False, False)
    """
    return metric.startswith(("judge/", "user/")) and not metric.startswith(LENGTH_CORRELATION)


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Pearson's; None where one of both does not vary."""
    try:
        return statistics.correlation(xs, ys)
    except statistics.StatisticsError:
        return None


def answer_length(messages: Sequence[Message]) -> int:
    """Characters of the last assistant message: tool calls and their results are work, not answer."""
    return next((len(m.text) for m in reversed(messages) if m.role == "assistant"), 0)


def length_metrics(rollouts: Sequence[Rollout], judges: Collection[str]) -> dict[str, float]:
    """The correlation of each judge's scores with the length of the answers, among the siblings of one group."""
    out: dict[str, float] = {}
    for name in sorted(judges):
        rows = [(r, r.scores[name]) for r in rollouts if name in r.scores and not r.scores[name].error]
        if len(rows) < 2:
            continue
        found = correlation([answer_length(r.messages) for r, _ in rows], [score.value for _, score in rows])
        if found is not None:
            out |= {f"{LENGTH_CORRELATION}{name}": found, f"{LENGTH_GROUPS}{name}": 1.0}
    return out
