"""Hints: what helps a model that never solves a problem, and is not there when it is scored.

It may solve the problem when it is told what goes wrong, shown a solved problem, or told the expected answer.

- For rejection sampling, `HintedEnvironment` adds a `Hint` to the prompts, and takes it out of the rollouts again, so
  that the model learns to do the same unaided. Measures never see the hint.
- For self-distillation, `choose_hint` is what the teacher reads and the student does not, by `distill.context`: another
  rollout of the group that passed, the reasons for which measures failed this one, or the expected answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from palestra.core.config_sections import HintName
from palestra.core.messages import show_call
from palestra.core.types import Group, Message, Problem, Rollout, Score, ToolResult
from palestra.envs.base import Environment, Episode, Split
from palestra.evals.rollout_stats import call_problem, called_successfully, calls_of, model_messages
from palestra.models.chat.template import ChatFormat

ANSWER_HINT = "The right result is: {answer}. Work it out step by step with the tools; do not just repeat it."
SIBLING = "A successful attempt at this task, as a worked example:\n\n{hint}\n\nNow solve the task yourself."
FEEDBACK = "An earlier attempt at this task failed, for these reasons:\n\n{hint}\n\nSolve the task without them."
ANSWER = "The expected answer of this task is:\n\n{hint}\n\nSolve the task so that you arrive at it."
_COMMON = 1 / 8  # a rule is given if at least this share of the attempts breaks it


@dataclass(frozen=True, slots=True)
class Hint:
    """Additions to a prompt: rules, solved examples as conversations, and whether the expected answer is included."""

    rules: tuple[str, ...] = ()
    examples: tuple[tuple[Message, ...], ...] = ()
    tells_answer: bool = False

    def apply(self, prompt: Sequence[Message], problem: Problem) -> list[Message]:
        """The prompt with the hint: examples before the last message, text behind the instructions."""
        sentences = list(self.rules)
        if self.tells_answer and problem.expect is not None:
            sentences.append(ANSWER_HINT.format(answer=answer_text(problem.expect)))
        *before, last = prompt
        shown = [message for example in self.examples for message in example]
        if not sentences:
            return [*before, *shown, last]
        text = " ".join(sentences)
        at = next((i for i, message in enumerate(before) if message.role == "system"), None)
        if at is None:
            return [*before, *shown, replace(last, text=f"{text}\n\n{last.text}")]
        before[at] = replace(before[at], text=f"{before[at].text}\n\n{text}")
        return [*before, *shown, last]


class HintedEpisode:
    """An episode whose prompt has a hint; for everything else the hint is not there."""

    def __init__(self, episode: Episode, prompt: Sequence[Message]) -> None:
        self.episode = episode
        self.prompt = tuple(prompt)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.episode, name)

    def plain(self, messages: Sequence[Message]) -> list[Message]:
        return [*self.episode.prompt, *messages[len(self.prompt) :]]

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message]:
        return await self.episode.reply(self.plain(messages))

    async def score(self, messages: Sequence[Message], tool_results: Sequence[ToolResult]) -> Mapping[str, Score]:
        return await self.episode.score(self.plain(messages), tool_results)


class HintedEnvironment:
    """An environment with hints in its prompts. `openings` has the plain prompt and tools of each problem it opened."""

    def __init__(self, environment: Environment, hints: Mapping[str, Hint]) -> None:
        """`hints` are by the problem's id; problems without one are opened as they are."""
        self.environment = environment
        self.hints = hints
        self.openings: dict[str, tuple[Sequence[Message], list[dict[str, Any]], int]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.environment, name)

    @property
    def reward_weights(self) -> Mapping[str, float]:
        return self.environment.reward_weights

    def problems(self, split: Split) -> Sequence[Problem]:
        return self.environment.problems(split)

    def open(self, problem: Problem) -> Episode:
        episode = self.environment.open(problem)
        prompt = list(episode.prompt)
        if hint := self.hints.get(problem.id):
            prompt = hint.apply(prompt, problem)
        self.openings[problem.id] = tuple(episode.prompt), [tool.schema for tool in episode.tools], len(prompt)
        hinted: Any = HintedEpisode(episode, prompt)
        return hinted

    async def score_group(self, episodes: Sequence[Any]) -> Sequence[Mapping[str, Score]] | None:
        score: Any = getattr(self.environment, "score_group", None)
        return None if score is None else await score([episode.episode for episode in episodes])

    def without_hint(self, rollout: Rollout, chat: ChatFormat) -> Rollout:
        """The rollout as if its prompt had had no hint: the same sampled tokens behind the plain prompt."""
        prompt, tools, hinted = self.openings[rollout.problem_id]
        turns = (chat.prompt(prompt, tools), *rollout.turns[1:])
        return replace(rollout, turns=turns, messages=(*prompt, *rollout.messages[hinted:]))


def rules_for(rollouts: Sequence[Rollout]) -> tuple[str, ...]:
    """Sentences against the mistakes that these attempts have in common, each derived from what they did."""
    wrong = {"unknown_tool", "invalid_arguments", "malformed"}
    shares = {
        sentence: share_of(has_mistake, rollouts)
        for sentence, has_mistake in (
            (
                "Call a tool before you answer; its result is what you need.",
                lambda rollout: bool(rollout.tool_names) and not called_successfully(rollout),
            ),
            (
                "Call only the tools that are listed, with all of their arguments.",
                lambda r: not wrong.isdisjoint(call_problem(result, r.tool_names) for result in r.tool_results),
            ),
            (
                "Do not make up numbers or names: take every argument of a call from the question or from the result "
                "of an earlier call, and look up first what you do not know.",
                lambda rollout: not is_grounded(rollout),
            ),
            ("Do not repeat a call that you have already made.", lambda r: len(set(calls_of(r))) < len(calls_of(r))),
            (
                "As soon as you have the result, answer in words and call no more tools.",
                lambda r: r.stop == "tool_limit",
            ),
            ("Be brief.", lambda rollout: rollout.cut_off),
        )
    }
    return tuple(sentence for sentence, share in shares.items() if share >= _COMMON)


def share_of(trait: Callable[[Rollout], bool], rollouts: Sequence[Rollout]) -> float:
    """The share of the rollouts without error that have a trait."""
    good = [r for r in rollouts if r.error is None]
    return sum(map(trait, good)) / len(good) if good else 0.0


def is_grounded(rollout: Rollout, *, answer: bool = False) -> bool:
    """Whether all numbers in its calls (or in its answer) appear in the prompt, or in the result of an earlier call.

    Numbers from nowhere are guesses. A solution with guesses may pass by luck, and is not to be imitated.
    """
    opening = opening_of(rollout)
    known = _words(" ".join(message.text for message in opening))
    for message in rollout.messages[len(opening) :]:
        if message.role != "assistant":
            known |= _words(message.text)
            continue
        said = [value for call in message.tool_calls for value in _leaves(call.arguments)]
        if answer:
            said = [] if message.tool_calls else [message.text]
        if not all(_numbers_of(value) <= known for value in said):
            return False
    return True


def quality(rollout: Rollout) -> int:
    """How well a passed rollout serves as a demonstration; lower is better.

    0: all that it says comes from the question and the tools. 1: it worked out its answer by itself. 2: it guessed an
    argument of a call. 3: no tool helped it.
    """
    if not rollout.tool_names:
        return 0
    if not called_successfully(rollout):
        return 3
    if not is_grounded(rollout):
        return 2
    return 0 if is_grounded(rollout, answer=True) else 1


def _numbers_of(value: Any) -> set[str]:
    """The numbers in an argument or a text, as they are written: `stock(7.0)` and "7 pieces" both have 7."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return {word for word in _words(str(value)) if word.isdigit()}


def _words(text: str) -> set[str]:
    return set("".join(c if c.isalnum() else " " for c in text.replace(",", "")).split())


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for one in value.values():
            yield from _leaves(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


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


def pass_rate(rollouts: Sequence[Rollout]) -> float:
    """The share of the rollouts without error that passed; 0 where no measure decides that."""
    return share_of(lambda rollout: rollout.passed, rollouts)
