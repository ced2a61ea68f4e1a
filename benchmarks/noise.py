"""An environment for measurements: prompts of random digits, rewards by chance, so that every group has a signal."""

from __future__ import annotations

import random
from typing import Any, ClassVar

from pydantic import BaseModel, Field

from palestra.envs.env import Env, EnvConfig


class NoiseConfig(EnvConfig):
    """How long the prompts are."""

    words: int = Field(1000, ge=1, description="digits in a prompt: two tokens each for palestra/tiny's tokenizer")


class Noise(Env):
    """Random digits, and a reward by chance."""

    name = "noise"
    env_config_cls: ClassVar[type[BaseModel]] = NoiseConfig

    def make_problem(self, rng: random.Random) -> Any:
        return " ".join(str(rng.randrange(10)) for _ in range(self.config.words)), ""

    def score(self, answer: str) -> float:
        return random.random()
