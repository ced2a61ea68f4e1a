"""What a self-teacher reads and the student does not: a hint, added to the problem's opening messages.

There are three kinds, by `distill.context`: another rollout of the group that passed (`sibling`), the reasons for which
measures failed this one (`feedback`), and the expected answer (`answer`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from palestra.core.config_sections import HintName
from palestra.core.show import show_call
from palestra.core.types import Group, Message, Problem, Rollout
from palestra.evals.rollout_stats import model_messages

SIBLING = "A successful attempt at this task, as a worked example:\n\n{hint}\n\nNow solve the task yourself."
FEEDBACK = "An earlier attempt at this task failed, for these reasons:\n\n{hint}\n\nSolve the task without them."
ANSWER = "The expected answer of this task is:\n\n{hint}\n\nSolve the task so that you arrive at it."


def choose_hint(contexts: Sequence[HintName], group: Group, rollout: Rollout, problem: Problem) -> str | None:
    """The first hint that there is for this rollout; None where there is none."""
    for context in contexts:
        match context:
            case "sibling":
                hint = sibling_hint(group, rollout)
            case "feedback":
                hint = feedback_hint(rollout)
            case "answer":
                hint = answer_hint(problem)
        if hint is not None:
            return hint
    return None


def sibling_hint(group: Group, rollout: Rollout) -> str | None:
    """The shortest of the other rollouts that passed, written out."""
    others = [r for r in group.rollouts if r is not rollout and r.error is None and r.passed]
    if not others:
        return None
    best = min(others, key=lambda r: r.sampled_tokens)
    return SIBLING.format(hint=transcript(best))


def feedback_hint(rollout: Rollout) -> str | None:
    """The reasons of the measures that count and did not pass."""
    failed = {name: s for name, s in rollout.scores.items() if s.counts and not s.error and not s.passed and s.reason}
    if not failed:
        return None
    return FEEDBACK.format(hint="\n".join(f"- {name}: {score.reason}" for name, score in failed.items()))


def answer_hint(problem: Problem) -> str | None:
    if problem.expect is None or problem.expect == "":
        return None
    return ANSWER.format(hint=answer_text(problem.expect))


def answer_text(expect: Any) -> str:
    """
    >>> answer_text("Rome"), answer_text(5), answer_text({"total": 5})
    ('Rome', '5', '{"total": 5}')
    """
    return expect if isinstance(expect, str) else json.dumps(expect, ensure_ascii=False, default=str)


def transcript(rollout: Rollout) -> str:
    """What the model said and what the tools answered, one line each."""
    lines: list[str] = []
    for message in rollout.messages[len(opening_of(rollout)) :]:
        speaker = {"assistant": "you", "tool": f"result of {message.name or 'the tool'}"}.get(
            message.role, message.role
        )
        lines += [f"{speaker}: {message.text}"] if message.text else []
        lines += [f"you call {show_call(call)}" for call in message.tool_calls]
    return "\n".join(lines)


def opening_of(rollout: Rollout) -> tuple[Message, ...]:
    """The messages before the first one that the model wrote."""
    written = model_messages(rollout)
    first = next((i for i, m in enumerate(rollout.messages) if written and m is written[0]), len(rollout.messages))
    return rollout.messages[:first]


def with_hint(opening: Sequence[Message], hint: str) -> list[Message]:
    """The opening messages with a hint at the end of the last one of the user."""
    last = max((i for i, m in enumerate(opening) if m.role == "user"), default=None)
    if last is None:
        return [*opening, Message("user", hint)]
    changed = replace(opening[last], text=f"{opening[last].text}\n\n{hint}")
    return [*opening[:last], changed, *opening[last + 1 :]]


def pass_rate(group: Group) -> float:
    """The share of the rollouts without error that passed; 0 where no measure decides that."""
    verdicts = [r.passed for r in group.rollouts if r.error is None]
    return sum(verdicts) / len(verdicts) if verdicts else 0.0
