"""A gymnasium environment with text observations: each answer of the model is one action."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from palestra.core.errors import RolloutError, SettingError, UnsupportedError
from palestra.core.types import Problem
from palestra.envs.base import Split
from palestra.envs.env import Env, EnvConfig, seeded_problems


class GymEnv(Env):
    """The problems are seeds; the reward is the sum over the episode.

    With a Discrete action space the answer names an action by its number, or by its name in `actions`; a Text space
    gets the answer as it is. Other spaces are refused: an ActionWrapper can turn text into their actions.

    An attempt without a valid action fails, and is not trained on: doing nothing must not beat steps that cost. With
    `invalid_reward` such attempts count, and each answer that is no action adds that much.
    """

    name = "gymnasium"
    scores_are_bounded = False

    def __init__(
        self,
        make: Callable[[], Any],
        question: str = "Begin.",
        actions: Sequence[str] = (),
        config: EnvConfig | None = None,
        invalid_reward: float | None = None,
    ) -> None:
        super().__init__(config)
        self._invalid_reward = invalid_reward
        self._make, self._question, self._actions = make, question, [name.lower() for name in actions]
        self._first = self._count = 0  # of the actions; none where the answer itself is the action
        self.environment: Any = None
        self.total, self.has_acted = 0.0, False

    def setup(self) -> None:
        """Check the action space once: one that text cannot name is refused before training."""
        probe = self._make()
        space = probe.action_space
        probe.close()
        kind = type(space).__name__
        if kind == "Text":
            return
        if kind == "MultiBinary" or not hasattr(space, "n"):
            raise UnsupportedError(
                f"the environment's actions are {space}; only Discrete and Text can be answered in words. "
                "Turn text into its actions with a gymnasium.ActionWrapper whose action_space is one of these"
            )
        self._first, self._count = int(getattr(space, "start", 0)), int(space.n)
        if self._actions and len(self._actions) != self._count:
            raise SettingError(f"{len(self._actions)} names for {self._count} actions; name every one of {space}")

    def problems(self, split: Split) -> Sequence[Problem]:
        return seeded_problems(self.config, split, self._question)

    def start(self) -> str:
        self.environment = self._make()
        self.total, self.has_acted = 0.0, False
        observation, _ = self.environment.reset(seed=self.problem.row["seed"])
        return f"{_text(observation)}\n\n{self._known()}".strip()

    def step(self, answer: str) -> str | None:
        action = self._action(answer.strip())
        if action is None:
            self.total += self._invalid_reward or 0.0
            return f"That is no action. {self._known()}"
        self.has_acted = True
        observation, reward, terminated, truncated, _ = self.environment.step(action)
        self.total += float(reward)
        return None if terminated or truncated else _text(observation)

    def _action(self, answer: str) -> Any:
        if not self._count:
            return answer
        if answer.lower() in self._actions:
            return self._first + self._actions.index(answer.lower())
        is_number = answer.removeprefix("-").isdecimal()
        return int(answer) if is_number and self._first <= int(answer) < self._first + self._count else None

    def _known(self) -> str:
        if self._actions:
            return f"Say one of: {', '.join(self._actions)}."
        return f"Say a number from {self._first} to {self._first + self._count - 1}." if self._count else ""

    def score(self, answer: str) -> float:
        if not self.has_acted and self._invalid_reward is None:
            raise RolloutError(
                f"no answer was an action, the last one {answer[:80]!r}. {self._known()} With a reward for wrong "
                "answers (env.invalid_reward, for example -1) such attempts are trained on"
            )
        return self.total

    def close(self) -> None:
        if self.environment is not None:
            self.environment.close()


def _text(observation: Any) -> str:
    """Text as it is; arrays and NumPy numbers, also inside of dicts and tuples, as JSON."""
    if isinstance(observation, str):
        return observation
    return json.dumps(observation, default=lambda value: value.tolist() if hasattr(value, "tolist") else str(value))
