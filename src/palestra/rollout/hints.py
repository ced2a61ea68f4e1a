"""Attempts with a hint in the prompt, and the same attempts without it.

A model that never solves a problem may solve it when it is told what goes wrong, shown a solved problem, or told the
expected answer. `HintedEnvironment` adds that to the prompts; `without_hint` takes it out of a rollout again, so that
the model learns to do the same unaided. Measures never see the hint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from palestra.core.types import Message, Problem, Rollout, Score, ToolResult
from palestra.envs.base import Environment, Episode, ScoresGroups, Split
from palestra.evals.rollout_stats import call_problem, called_successfully, model_messages
from palestra.models.chat.template import ChatFormat

ANSWER_HINT = "The right result is: {answer}. Work it out step by step with the tools; do not just repeat it."
_COMMON = 1 / 8  # a rule is given if at least this share of the attempts breaks it


@dataclass(frozen=True, slots=True)
class Hint:
    """What is added to a prompt: rules, solved examples as conversations, and whether the expected answer is told."""

    rules: tuple[str, ...] = ()
    examples: tuple[tuple[Message, ...], ...] = ()
    tells_answer: bool = False

    def apply(self, prompt: Sequence[Message], problem: Problem) -> list[Message]:
        """The prompt with the hint: examples before the last message, text behind the instructions."""
        sentences = list(self.rules)
        if self.tells_answer and problem.expect is not None:
            sentences.append(ANSWER_HINT.format(answer=_as_text(problem.expect)))
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

    def without_hint(self, rollout: Rollout, chat: ChatFormat) -> Rollout:
        """The rollout as if its prompt had had no hint: the same sampled tokens behind the plain prompt."""
        prompt, tools, hinted = self.openings[rollout.problem_id]
        turns = (chat.prompt(prompt, tools), *rollout.turns[1:])
        return replace(rollout, turns=turns, messages=(*prompt, *rollout.messages[hinted:]))


class HintedGroups(HintedEnvironment):
    """The same for environments that also judge siblings against each other."""

    async def score_group(self, episodes: Sequence[Any]) -> Sequence[Mapping[str, Score]] | None:
        assert isinstance(self.environment, ScoresGroups)
        return await self.environment.score_group([episode.episode for episode in episodes])


def with_hints(environment: Environment, hints: Mapping[str, Hint]) -> HintedEnvironment:
    kind = HintedGroups if isinstance(environment, ScoresGroups) else HintedEnvironment
    return kind(environment, hints)


def rules_for(rollouts: Sequence[Rollout]) -> tuple[str, ...]:
    """Sentences against the mistakes that these attempts have in common, each derived from what they did."""
    good = [r for r in rollouts if r.error is None]
    if not good:
        return ()
    shares = {
        sentence: sum(map(has_mistake, good)) / len(good)
        for sentence, has_mistake in (
            ("Call a tool before you answer; its result is what you need.", _never_called),
            ("Call only the tools that are listed, with all of their arguments.", _called_wrongly),
            (
                "Do not make up numbers or names: take every argument of a call from the question or from the result "
                "of an earlier call, and look up first what you do not know.",
                lambda rollout: not is_grounded(rollout),
            ),
            ("Do not repeat a call that you have already made.", _repeats_calls),
            ("As soon as you have the result, answer in words and call no more tools.", _never_answers),
            ("Be brief.", lambda rollout: rollout.cut_off),
        )
    }
    return tuple(sentence for sentence, share in shares.items() if share >= _COMMON)


def _never_called(rollout: Rollout) -> bool:
    return bool(rollout.tool_names) and not called_successfully(rollout)


def _called_wrongly(rollout: Rollout) -> bool:
    problems = {call_problem(result, rollout.tool_names) for result in rollout.tool_results}
    return bool(problems & {"unknown_tool", "invalid_arguments", "malformed"})


def _repeats_calls(rollout: Rollout) -> bool:
    calls = [(result.call.name, json.dumps(result.call.arguments, sort_keys=True)) for result in rollout.tool_results]
    return len(set(calls)) < len(calls)


def _never_answers(rollout: Rollout) -> bool:
    return rollout.stop == "tool_limit"


def is_grounded(rollout: Rollout, *, answer: bool = False) -> bool:
    """Whether all numbers in its calls (or in its answer) appear in the prompt, or in the result of an earlier call.

    Numbers from nowhere are guesses. A solution with guesses may pass by luck, and is not to be imitated.
    """
    written = model_messages(rollout)
    first = next((i for i, message in enumerate(rollout.messages) if any(message is own for own in written)), 0)
    known = _words(" ".join(message.text for message in rollout.messages[:first]))
    for message in rollout.messages[first:]:
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


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
