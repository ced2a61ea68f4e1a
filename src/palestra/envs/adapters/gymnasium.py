"""A gymnasium environment that speaks text: each answer of the model is one action."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from palestra.core.types import Problem
from palestra.envs.base import Split
from palestra.envs.env import Env, EnvConfig

_HELD_OUT_SEED = 1_000_000


class GymEnv(Env):
    """The problems are seeds; the reward is the sum over the episode.

    With a Discrete action space the answer names an action by its number, or by its name in `actions`;
    any other space gets the answer as text.
    """

    name = "gymnasium"
    scores_are_bounded = False

    def __init__(
        self,
        make: Callable[[], Any],
        question: str = "Begin.",
        actions: Sequence[str] = (),
        config: EnvConfig | None = None,
    ) -> None:
        super().__init__(config)
        self._make, self._question, self._actions = make, question, [name.lower() for name in actions]
        self.environment: Any = None
        self.total = 0.0

    def problems(self, split: Split) -> Sequence[Problem]:
        first = self.config.seed + (0 if split == "train" else _HELD_OUT_SEED)
        size = self.config.train_size if split == "train" else self.config.held_out_size
        return [Problem("", self._question, row={"seed": seed}) for seed in range(first, first + size)]

    def start(self) -> str:
        self.environment = self._make()
        self.total = 0.0
        observation, _ = self.environment.reset(seed=self.problem.row["seed"])
        return _text(observation)

    def step(self, answer: str) -> str | None:
        action = self._action(answer.strip())
        if action is None:
            return f"That is no action. {self._known()}"
        observation, reward, terminated, truncated, _ = self.environment.step(action)
        self.total += float(reward)
        return None if terminated or truncated else _text(observation)

    def _action(self, answer: str) -> Any:
        count = getattr(self.environment.action_space, "n", None)
        if count is None:
            return answer
        if answer.lower() in self._actions:
            return self._actions.index(answer.lower())
        return int(answer) if answer.isdecimal() and int(answer) < count else None

    def _known(self) -> str:
        if self._actions:
            return f"Say one of: {', '.join(self._actions)}."
        return f"Say a number from 0 to {int(self.environment.action_space.n) - 1}."

    def score(self, answer: str) -> float:
        return self.total

    def close(self) -> None:
        if self.environment is not None:
            self.environment.close()


def _text(observation: Any) -> str:
    if isinstance(observation, str):
        return observation
    plain = observation.tolist() if hasattr(observation, "tolist") else observation
    return json.dumps(plain, default=str)
