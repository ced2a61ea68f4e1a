"""A language model as a measure, through any OpenAI-style endpoint."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from palestra.core.errors import PalestraError
from palestra.core.http import Request, Retries, ask
from palestra.core.types import Message, Score
from palestra.evals.measures import Measure, MeasureContext

_OPENAI = "https://api.openai.com/v1"
_RETRIES = Retries(attempts=3, backoff=2.0)
_TASK = (
    "You grade an assistant's work by a rubric. Answer with one JSON object and nothing else: "
    '{"score": a number from 0 (bad) to 1 (perfect), "reason": one short sentence}.'
)
_JSON_OBJECT = re.compile(r"\{.*\}", re.DOTALL)


def judge(
    model: str,
    rubric: str,
    *,
    base_url: str | None = None,
    api_key_env: str = "OPENAI_API_KEY",
    name: str = "judge",
    threshold: float = 0.5,
    timeout_s: float = 60.0,
) -> Measure:
    """A measure that asks `model` to grade by `rubric`; a score of at least `threshold` passes.

    It is asked at `base_url`; without one at OPENAI_BASE_URL, else at api.openai.com.
    The key is read from the environment variable `api_key_env`; local servers need none.
    """
    endpoint = (base_url or os.environ.get("OPENAI_BASE_URL") or _OPENAI).rstrip("/")
    if endpoint == _OPENAI and not os.environ.get(api_key_env):
        raise PalestraError(
            f"judge({model!r}) needs the key of {_OPENAI} in the environment variable {api_key_env}. "
            "Set it, or name another endpoint: judge(…, base_url='http://localhost:11434/v1')."
        )

    def grade(context: MeasureContext) -> Score:
        messages = [{"role": "system", "content": _TASK}, {"role": "user", "content": _question(rubric, context)}]
        body = {"model": model, "messages": messages, "temperature": 0}
        url, key = f"{endpoint}/chat/completions", os.environ.get(api_key_env)
        answer = ask(Request(url, body, token=key, timeout_s=timeout_s), _RETRIES)
        value, reason = read_verdict(answer["choices"][0]["message"]["content"])
        return Score(value, value >= threshold, reason)

    return Measure(name, grade, threshold)


def read_verdict(text: str) -> tuple[float, str]:
    """The score and the reason out of a judge's answer; ValueError when it gave none."""
    found = _JSON_OBJECT.search(text.rpartition("</think>")[2])
    verdict: dict[str, Any] = json.loads(found.group()) if found else {}
    score = verdict.get("score")
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not 0.0 <= score <= 1.0:
        raise ValueError(f"the judge gave no score from 0 to 1: {text[:200]!r}")
    return float(score), str(verdict.get("reason", ""))


def _question(rubric: str, context: MeasureContext) -> str:
    expected = "" if context.expect is None else f"\n\n# Expected\n{context.expect}"
    conversation = "\n\n".join(_line(message) for message in context.messages)
    return f"# Rubric\n{rubric}{expected}\n\n# Conversation\n{conversation}"


def _line(message: Message) -> str:
    calls = "".join(f"\n[calls {call.name}({json.dumps(call.arguments, default=str)})]" for call in message.tool_calls)
    return f"{message.role}: {message.text}{calls}"
