"""What the step trainer is given: a reward, rows and prompts in the forms that people have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from palestra.chat.template import ChatFormat
from palestra.core.errors import PalestraError
from palestra.core.messages import as_messages
from palestra.core.types import Message, Problem

Prompt = str | Sequence[Message | Mapping[str, Any]]
Input = str | tuple[Message, ...]


class RewardModel(Protocol):
    def calculate_combined_reward(self, output: str, expected_answer: Any) -> float: ...


Reward = RewardModel | Callable[[str, Any], float]


def reward_function(reward: Reward) -> Callable[[str, Any], float]:
    """A function, or an object's calculate_combined_reward, as a function that gives floats."""
    combined = getattr(reward, "calculate_combined_reward", reward)
    if not callable(combined):
        raise PalestraError(
            f"the reward is a {type(reward).__name__}; expected a function (output, expected_answer) -> float, "
            "or an object with calculate_combined_reward(output, expected_answer)"
        )

    def call(output: str, expected_answer: Any) -> float:
        value = combined(output, expected_answer)
        try:
            return float(value)
        except (TypeError, ValueError):
            raise PalestraError(f"the reward of an answer is {value!r}; expected a number") from None

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
    raise PalestraError(f"row {index} of the dataset is {got}; expected `prompt` and `expected_answer`, or a pair")


def as_input(prompt: Prompt) -> Input:
    """Text as it is; messages as Messages, also from {"role": …, "content": …}."""
    return prompt if isinstance(prompt, str) else as_messages(prompt)


def encode_prompt(tokenizer: Any, prompt: Input) -> tuple[int, ...]:
    """Text as the tokenizer takes it; messages through its chat template."""
    ids = (
        tuple(tokenizer(prompt).input_ids)
        if isinstance(prompt, str)
        else ChatFormat(tokenizer).prompt(prompt).token_ids
    )
    if not ids:
        raise PalestraError("a prompt has no tokens; give it some text")
    return ids


def stop_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Whatever model, tokenizer and chat template take for the end of an answer."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = [*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id]
    found = {end for end in ends if end is not None}
    if getattr(tokenizer, "chat_template", None):
        found |= set(ChatFormat(tokenizer).stop_token_ids)
    return tuple(sorted(found))
