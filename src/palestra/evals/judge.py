"""Language models as measures: `judge` grades one attempt by a rubric, `ruler` ranks all attempts at a case."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from palestra.core.calls import call_user_code
from palestra.core.chat_model import CallLimits, ChatModel, log_judge
from palestra.core.errors import InputError, SettingError
from palestra.core.messages import read_json
from palestra.core.types import Message, Score
from palestra.evals.measures import Measure, MeasureContext

_JUDGE_TIMEOUT_S = 3600.0  # waiting for a rate limit included; the limits of a single call are shorter
_CASE_TIMEOUT_S = 300.0  # of a rubric's function
_TASK = (
    "You grade an assistant's work by a rubric. Answer with one JSON object and nothing else: "
    '{"score": a number from 0 (bad) to 1 (perfect), "reason": one short sentence}.'
)
_CRITERIA_TASK = (
    "You grade an assistant's work by the criteria of a rubric. Answer with one JSON object and nothing else: "
    '{"criteria": {"1": a number from 0 (not met) to 1 (fully met), "2": …}, "reason": one short sentence}. '
    "Give every criterion its number."
)
_RANK_TASK = (
    "You compare several attempts of an assistant at the same task. The beginning that they share is given once. Judge "
    "how well each attempt reaches the task's goal; an attempt that does scores far higher than one that does not, and "
    "of two that do, the one with less needless work scores a little higher. Length by itself is no merit. Answer with "
    'one JSON object and nothing else: {"attempts": {"1": {"reason": one short sentence, "score": a number from 0 to '
    '1}, "2": …}}. Give every attempt its score; attempts that are equally good get the same.'
)

Rubric = str | Callable[[Mapping[str, Any]], Any]
Criteria = Mapping[str, float] | Sequence[Any] | Callable[[Mapping[str, Any]], Any]


def judge(
    model: str,
    rubric: Rubric = "",
    *,
    criteria: Criteria | None = None,
    base_url: str | None = None,
    api_key_env: str = "OPENAI_API_KEY",
    name: str = "judge",
    threshold: float = 0.5,
    temperature: float | None = 0.0,
    max_new_tokens: int | None = None,
    cache: bool | str | Path = True,
    **limits: Any,
) -> Measure:
    """A measure that asks `model` to grade by `rubric`; a score of at least `threshold` passes.

    The model is a name at an OpenAI-style endpoint (`base_url`; without one OPENAI_BASE_URL, else api.openai.com), a
    local model ("local/Qwen/Qwen3-0.6B", a folder), or "policy", the model in training. The key is read from the
    environment variable `api_key_env`.

    `rubric` and `criteria` may be functions of the case's record: `rubric=lambda case: case["rubric"]`. Criteria are
    texts with weights, {"names the price": 2, "is brief": 1}; the score is their weighted mean, and a negative weight
    takes away. `limits` are those of `CallLimits`: max_concurrent, requests_per_minute, max_cost, ….
    """
    if not rubric and criteria is None:
        raise SettingError("judge needs a rubric or criteria: judge(model, 'The answer is polite.')")
    if criteria is not None and not callable(criteria):
        _read_criteria(criteria)
    options: dict[str, Any] = dict(api_key_env=api_key_env, temperature=temperature, max_new_tokens=max_new_tokens)
    asked = ChatModel(model, base_url, purpose="judge", limits=CallLimits.of("judge", limits), cache=cache, **options)

    async def grade(context: Any) -> Score:
        context = _as_context(context)
        log_judge(name)
        text = await _of_case(rubric, context)
        if criteria is None:
            question = _question(f"# Rubric\n{text}", context)
            value, reason = await asked.ask(_chat(_TASK, question), read_verdict)
            return Score(value, value >= threshold, reason)
        weighted = _read_criteria(await _of_case(criteria, context))
        listed = "\n".join(f"{i}. {criterion}" for i, criterion in enumerate(weighted, start=1))
        question = _question(f"# Rubric\n{text}\n# Criteria\n{listed}" if text else f"# Criteria\n{listed}", context)

        def read_met(text: str) -> tuple[list[float], str]:
            answer = _read_object(text)
            met = _require_map(answer, "criteria", text)
            return [_number(met.get(str(i + 1)), text) for i in range(len(weighted))], str(answer.get("reason", ""))

        met, reason = await asked.ask(_chat(_CRITERIA_TASK, question), read_met)
        possible = sum(weight for weight in weighted.values() if weight > 0)
        value = sum(m * weight for m, weight in zip(met, weighted.values(), strict=True)) / possible
        value = min(1.0, max(0.0, value))  # negative weights take away
        shown = ", ".join(f"{c} {m:g}" for c, m in zip(weighted, met, strict=True))
        return Score(value, value >= threshold, f"{reason} ({shown})".strip())

    return Measure(name, grade, threshold, timeout_s=_JUDGE_TIMEOUT_S)


def ruler(
    model: str,
    rubric: Rubric = "",
    *,
    base_url: str | None = None,
    api_key_env: str = "OPENAI_API_KEY",
    name: str = "ruler",
    threshold: float = 0.5,
    temperature: float | None = 0.0,
    max_new_tokens: int | None = None,
    cache: bool | str | Path = True,
    **limits: Any,
) -> Measure:
    """A measure that asks `model` to rank all attempts at a case against each other, in one call, with reasons.

    What the attempts begin with alike is sent once, and equal attempts are sent once and scored alike. They are shown
    in an order that depends on the content alone. The arguments are those of `judge`; `rubric` adds to the task.
    """
    options: dict[str, Any] = dict(api_key_env=api_key_env, temperature=temperature, max_new_tokens=max_new_tokens)
    asked = ChatModel(model, base_url, purpose="judge", limits=CallLimits.of("ruler", limits), cache=cache, **options)

    async def rank(attempts: Sequence[Any]) -> list[Score]:
        contexts = [_as_context(attempt) for attempt in attempts]
        log_judge(name)
        # messages with which all begin alike; of equal conversations the last one is left over
        rows = zip(*([_line(message) for message in context.messages] for context in contexts), strict=False)
        alike = sum(1 for _ in takewhile(lambda row: len(set(row)) == 1, rows))
        shared = max(0, min(alike, min(len(context.messages) for context in contexts) - 1))
        texts = [conversation_text(context.messages[shared:]) for context in contexts]
        shown = sorted(set(texts))  # in an order by the texts, which reveals nothing about the attempts
        random.Random(hashlib.blake2b("\0".join(shown).encode(), digest_size=8).digest()).shuffle(shown)
        first, added = contexts[0], await _of_case(rubric, contexts[0])
        head = f"# Rubric\n{added}\n\n" if added else ""
        beginning = f"# Shared beginning\n{conversation_text(first.messages[:shared])}" if shared else ""
        listed = "\n\n".join(f"# Attempt {i}\n{text}" for i, text in enumerate(shown, start=1))
        question = f"{head}{beginning}{_expected(first)}\n\n{listed}"

        def read_ranks(text: str) -> list[tuple[float, str]]:
            ranked = _require_map(_read_object(text), "attempts", text)
            verdicts = [ranked.get(str(i)) for i in range(1, len(shown) + 1)]
            return [_read_score(v if isinstance(v, Mapping) else {"score": v}, text) for v in verdicts]

        verdicts = await asked.ask(_chat(_RANK_TASK, question), read_ranks)
        by_text = dict(zip(shown, verdicts, strict=True))
        return [Score(by_text[t][0], by_text[t][0] >= threshold, by_text[t][1]) for t in texts]

    return Measure(name, rank, threshold, group=True, timeout_s=_JUDGE_TIMEOUT_S)


def read_verdict(text: str) -> tuple[float, str]:
    """The score and the reason out of a judge's answer; ValueError when it gave none."""
    return _read_score(_read_object(text), text)


def _read_score(verdict: Mapping[str, Any], text: str) -> tuple[float, str]:
    return _number(verdict.get("score"), text), str(verdict.get("reason", ""))


def _require_map(answer: Mapping[str, Any], name: str, text: str) -> Mapping[str, Any]:
    if not isinstance(found := answer.get(name), Mapping):
        raise ValueError(f"the judge gave no {name}: {text[:200]!r}")
    return found


def _read_object(text: str) -> Mapping[str, Any]:
    text = text.rpartition("</think>")[2]
    written = text[text.find("{") : text.rfind("}") + 1]
    answer = read_json(written) if written.startswith("{") else {}
    return answer if isinstance(answer, Mapping) else {}


def _number(value: Any, text: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value <= 1.0:
        raise ValueError(f"the judge gave no score from 0 to 1: {text[:200]!r}")
    return float(value)


def _read_criteria(criteria: Any) -> dict[str, float]:
    """Texts with weights: a mapping, or a list of texts or of records with a text and a weight (or points)."""
    if isinstance(criteria, str):
        criteria = [criteria]
    if isinstance(criteria, Mapping):
        weights = {str(text): float(weight) for text, weight in criteria.items()}
    else:
        weights = {}
        for row in criteria or ():
            record = row if isinstance(row, Mapping) else {"text": row} if isinstance(row, str) else {}
            texts = [record[key] for key in ("criterion", "text", "description") if key in record]
            if not texts:
                raise InputError(f"a criterion is {row!r}; expected a text, or {{'criterion': …, 'weight': …}}")
            weights[str(texts[0])] = float(next((record[key] for key in ("weight", "points") if key in record), 1.0))
    if not any(weight > 0 for weight in weights.values()):
        raise SettingError(
            f"criteria are {criteria!r}; expected texts with weights, at least one above 0: {{'names the price': 2}}"
        )
    return weights


async def _of_case(value: Any, context: MeasureContext) -> Any:
    if not callable(value):
        return value
    return await call_user_code("a function of the judge", value, context.case.row, limit_s=_CASE_TIMEOUT_S)


def _as_context(attempt: Any) -> MeasureContext:
    """A measure's context, or an attempt of an `Env`, which has messages and a problem."""
    if isinstance(attempt, MeasureContext):
        return attempt
    return MeasureContext(attempt.messages, attempt.tool_results, attempt.problem.expect, attempt.problem)


def _chat(task: str, question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": task}, {"role": "user", "content": question}]


def _question(head: str, context: MeasureContext) -> str:
    return f"{head}{_expected(context)}\n\n# Conversation\n{conversation_text(context.messages)}"


def _expected(context: MeasureContext) -> str:
    return "" if context.expect is None else f"\n\n# Expected\n{context.expect}"


def conversation_text(messages: Sequence[Message]) -> str:
    """The messages as a reader sees them, with their tool calls."""
    return "\n\n".join(_line(message) for message in messages)


def _line(message: Message) -> str:
    calls = "".join(f"\n[calls {call.name}({json.dumps(call.arguments, default=str)})]" for call in message.tool_calls)
    return f"{message.role}: {message.text}{calls}"
