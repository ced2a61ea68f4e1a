"""Prompts and a reward as a task."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from palestra.core.calls import call_user_code
from palestra.core.config import RunConfig
from palestra.core.errors import InputError, UserCodeError
from palestra.core.messages import as_messages
from palestra.core.run_folder import RunKind
from palestra.core.types import Message, Problem, Score, ToolResult, Turn
from palestra.envs.base import Episode, Split
from palestra.models.chat.template import ChatFormat
from palestra.policy.base import Policy
from palestra.rollout.agent_loop import Speaker, TokenSpeaker
from palestra.rollout.collect import AgentLoop, Collector
from palestra.rollout.rewards import REWARD_TIMEOUT_S
from palestra.train.group_source import ProblemSource
from palestra.train.limits import attempt_limits
from palestra.train.tasks import Parts

Prompt = str | Sequence[Message | Mapping[str, Any]]
Input = str | tuple[Message, ...]


Reward = Any  # (output, expected_answer) -> float, or an object with calculate_combined_reward of this form


def reward_function(reward: Reward) -> Callable[[str, Any], float]:
    """A function, or an object's calculate_combined_reward, as a function that returns floats."""
    combined = getattr(reward, "calculate_combined_reward", reward)
    if not callable(combined):
        raise UserCodeError(
            f"the reward is a {type(reward).__name__}; expected a function (output, expected_answer) -> float, "
            "or an object with calculate_combined_reward(output, expected_answer)"
        )

    one_at_a_time = threading.Lock()  # it is called in threads, and may be a model

    def call(output: str, expected_answer: Any) -> float:
        with one_at_a_time:
            value = combined(output, expected_answer)
        try:
            return float(value)
        except (TypeError, ValueError):
            raise UserCodeError(f"the reward of an answer is {value!r}; expected a number") from None

    return call


def as_problem(index: int, row: Any) -> Problem:
    """A dataset's row: a mapping with `prompt` and `expected_answer` (or `answer`), or a pair of the two."""
    if isinstance(row, Mapping):
        answer = next((key for key in ("expected_answer", "answer") if key in row), None)
        if "prompt" in row:
            return Problem(str(index), as_input(row["prompt"]), row[answer] if answer else None, dict(row))
    elif isinstance(row, (tuple, list)) and len(row) == 2:
        return Problem(str(index), as_input(row[0]), row[1])
    got = sorted(row) if isinstance(row, Mapping) else type(row).__name__
    raise InputError(f"row {index} of the dataset is {got}; expected `prompt` and `expected_answer`, or a pair")


def as_input(prompt: Prompt) -> Input:
    """Text as it is; messages as Messages, also from {"role": …, "content": …}."""
    return prompt if isinstance(prompt, str) else as_messages(prompt)


def stop_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Token ids that model, tokenizer or chat template define as the end of an answer."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = [*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id]
    if getattr(tokenizer, "chat_template", None):
        ends += ChatFormat(tokenizer).stop_token_ids
    return tuple(sorted({end for end in ends if end is not None}))


@dataclass(frozen=True, slots=True)
class PromptEpisode:
    """One answer to one prompt; without a reward it earns nothing."""

    problem: Problem
    reward: Callable[[str, Any], float] | None
    tools: tuple[()] = ()

    @property
    def prompt(self) -> tuple[Message, ...]:
        return as_messages(self.problem.input)

    async def reply(self, messages: Sequence[Message]) -> Sequence[Message]:
        return ()

    async def score(self, messages: Sequence[Message], tool_results: Sequence[ToolResult]) -> Mapping[str, Score]:
        if self.reward is None:
            return {}
        answer = messages[-1].text
        value = await call_user_code("scoring", self.reward, answer, self.problem.expect, limit_s=REWARD_TIMEOUT_S)
        return {"reward": Score(value, value >= 1.0)}

    def close(self) -> None: ...


class _Texts:
    """Stands in for a ChatFormat: answers are text without tool calls."""

    shows_call_ids = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def read(self, token_ids: Sequence[int], *_: Any) -> Message:
        return Message("assistant", str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True)))


@dataclass(frozen=True, slots=True)
class PromptTask:
    """A dataset of prompts as a run's task, and as the environment in which they are answered in one turn."""

    dataset: Sequence[Problem]
    reward: Callable[[str, Any], float] | None
    tokenizer: Any
    stops: tuple[int, ...]
    kind: RunKind = "prompts"
    reward_weights: Mapping[str, float] = field(default_factory=dict)

    @property
    def problem_count(self) -> int:
        return len(self.dataset)

    def problems(self, split: Split) -> Sequence[Problem]:
        return self.dataset if split == "train" else ()

    def open(self, problem: Problem) -> PromptEpisode:
        return PromptEpisode(problem, self.reward)

    def collector(self, policy: Policy[Any], config: RunConfig) -> Collector:
        """Sample text prompts unchanged, and messages in the tokenizer's chat template."""

        def start(episodes: Sequence[Episode]) -> list[Speaker]:
            first: Any = episodes[0]
            if isinstance(text := first.problem.input, str):
                ids = tuple(self.tokenizer(text).input_ids)
            else:
                ids = tuple(ChatFormat(self.tokenizer).prompt(text).token_ids.tolist())
            if not ids:
                raise InputError("a prompt has no tokens; give it some text")
            texts: Any = _Texts(self.tokenizer)
            prompt = Turn("template", ids)  # type: ignore[arg-type]
            return [TokenSpeaker(policy, s, texts, prompt) for s in policy.fork(policy.open(ids), len(episodes))]

        limits = attempt_limits(config, self.stops, training=True)
        return Collector(self, AgentLoop(limits, start), max_open_episodes=config.rollout.max_open_episodes)

    def source(self, parts: Parts) -> ProblemSource:
        collector, config = self.collector(parts.policy, parts.config), parts.config
        return ProblemSource(collector, self.dataset, {}, config.rollout.group_size, config.seed, refills=False)

    def evaluator(self, parts: Parts) -> None:
        """No evaluator: all prompts are trained on."""
