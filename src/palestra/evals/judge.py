"""A language model as a measure, through any OpenAI-style endpoint."""

from __future__ import annotations

import json
import os
import re
import time
import urllib.error
import urllib.request
from typing import Any

from palestra.core.errors import PalestraError
from palestra.core.types import Message, Score
from palestra.evals.measures import Measure, MeasureContext

_OPENAI = "https://api.openai.com/v1"
_ATTEMPTS = 3
_TASK = (
    "You grade an assistant's work by a rubric. Answer with one JSON object and nothing else: "
    '{"score": a number from 0 (bad) to 1 (perfect), "reason": one short sentence}.'
)
_JSON_OBJECT = re.compile(r"\{.*\}", re.DOTALL)


def judge(
    model: str,
    rubric: str,
    *,
    base_url: str = _OPENAI,
    api_key_env: str = "OPENAI_API_KEY",
    name: str = "judge",
    threshold: float = 0.5,
    timeout_s: float = 60.0,
) -> Measure:
    """A measure that asks `model` to grade by `rubric`; a score of at least `threshold` passes.

    The key is read from the environment variable `api_key_env`; local servers need none.
    """
    if base_url == _OPENAI and not os.environ.get(api_key_env):
        raise PalestraError(
            f"judge({model!r}) needs the key of {_OPENAI} in the environment variable {api_key_env}. "
            "Set it, or name another endpoint: judge(…, base_url='http://localhost:11434/v1')."
        )

    def grade(context: MeasureContext) -> Score:
        messages = [{"role": "system", "content": _TASK}, {"role": "user", "content": _question(rubric, context)}]
        request = {"model": model, "messages": messages, "temperature": 0}
        answer = _post(f"{base_url.rstrip('/')}/chat/completions", request, os.environ.get(api_key_env), timeout_s)
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


def _post(url: str, body: dict[str, Any], api_key: str | None, timeout_s: float) -> Any:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            busy = error.code == 429 or error.code >= 500
            if not busy or attempt == _ATTEMPTS:
                raise RuntimeError(
                    f"{url} answered {error.code}: {error.read()[:200].decode(errors='replace')}"
                ) from None
        time.sleep(0.5 * 2**attempt)
    raise AssertionError("the last attempt returns or raises")
