"""The workload and the results of a comparison. Imports no torch, so that invalid sizes are rejected at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from palestra.core.errors import SettingError

Side = Literal["engine", "plain", "generate"]  # plain is NaivePolicy
SIDES: tuple[Side, ...] = get_args(Side)
TOOL_RESULT_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Workload:
    """The work of every side: `prompts` × `group_size` rollouts, each turn of `new_tokens`."""

    prompts: int = 8
    group_size: int = 8
    prompt_tokens: int = 128
    new_tokens: int = 64
    tool_rounds: int = 3

    @property
    def rollouts(self) -> int:
        return self.prompts * self.group_size

    @property
    def scenarios(self) -> dict[str, int]:
        """Each scenario's name -> its tool rounds."""
        rounds = self.tool_rounds
        return {"single turn": 0} | ({f"{rounds} tool round{'s' * (rounds > 1)}": rounds} if rounds else {})

    @property
    def longest_rollout(self) -> int:
        return self.prompt_tokens + self.new_tokens + self.tool_rounds * (self.new_tokens + TOOL_RESULT_TOKENS)

    def check(self) -> None:
        """Raise for sizes that leave nothing to measure."""
        for name, least in (("prompts", 1), ("group_size", 1), ("prompt_tokens", 1), ("new_tokens", 1)):
            check_least(name, getattr(self, name), least)
        check_least("tool_rounds", self.tool_rounds, 0)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One side of one scenario. `computed_tokens` went through the model; each gave a sampled token or was prefill."""

    side: Side
    wall_s: float
    cpu_s: float
    sampled_tokens: int
    computed_tokens: int

    @property
    def prefilled_tokens(self) -> int:
        return self.computed_tokens - self.sampled_tokens

    @property
    def tokens_per_s(self) -> float:
        return self.sampled_tokens / self.wall_s

    def ratios_to(self, other: Measurement) -> dict[str, float]:
        """How many times better this side is: faster, fewer CPU seconds, fewer tokens computed."""
        return {
            "tokens_per_s": self.tokens_per_s / other.tokens_per_s,
            "cpu_s": other.cpu_s / self.cpu_s,
            "computed_tokens": other.computed_tokens / self.computed_tokens,
        }


Results = dict[str, dict[Side, Measurement]]  # scenario -> side -> its result


def check_least(name: str, value: int, least: int) -> None:
    """Raise for a count that leaves nothing to measure."""
    if value < least:
        raise SettingError(f"{name}={value} leaves nothing to measure; use {least} or more")
