"""Environments of other libraries by name, for the command line: `palestra train --env gymnasium:FrozenLake-v1`.

gymnasium:ID     gymnasium.make(ID)
verifiers:NAME   an installed environment package: load_environment(NAME), or the Taskset of verifiers 0.3 and later
openenv:URL      a server that runs there
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any, ClassVar

from pydantic import BaseModel, Field

from palestra.core.errors import PalestraError, UserCodeError, needs_extra, text_of
from palestra.envs.env import Env, EnvConfig
from palestra.extras.adapters.gymnasium import GymEnv
from palestra.extras.adapters.openenv import OpenEnv
from palestra.extras.adapters.verifiers import TasksetEnv, VerifiersEnv


class NamedConfig(EnvConfig):
    target: str = Field("", description="which one: what follows the colon")
    arguments: dict[str, Any] = Field(default_factory=dict, description="arguments that it is made with, as JSON")
    question: str = Field("Begin.", description="what the user says before the first observation")


class GymConfig(NamedConfig):
    actions: list[str] = Field(default_factory=list, description="a name for each action, as JSON")
    invalid_reward: float | None = Field(
        None,
        ge=-1e6,
        le=1e6,
        description="reward of an answer that is no action; none: an attempt without any action fails",
    )


class OpenEnvConfig(NamedConfig):
    max_sessions: int | None = Field(None, ge=1, le=4096, description="sessions that the server has at a time")


class NamedGymEnv(GymEnv):
    """gymnasium.make(ID)."""

    env_config_cls: ClassVar[type[BaseModel]] = GymConfig

    def __init__(self, config: GymConfig) -> None:
        make = partial(_library("gymnasium").make, config.target, **config.arguments)
        super().__init__(make, config.question, config.actions, config, config.invalid_reward)


class NamedOpenEnv(OpenEnv):
    """An OpenEnv server at a URL."""

    env_config_cls: ClassVar[type[BaseModel]] = OpenEnvConfig

    def __init__(self, config: OpenEnvConfig) -> None:
        _library("websockets", "openenv")
        super().__init__(config.target, config, config.question, config.max_sessions)


class NamedVerifiersEnv(Env):
    """An installed environment of verifiers; which generation it is of decides the adapter."""

    env_config_cls: ClassVar[type[BaseModel]] = NamedConfig

    def __new__(cls, config: NamedConfig) -> Any:
        library = _library("verifiers")
        try:
            if hasattr(library, "load_environment"):
                return VerifiersEnv(library.load_environment(config.target, **config.arguments), config)
            loaders = importlib.import_module("verifiers.v1.utils.loaders")
            settings = loaders.taskset_config_type(config.target)(id=config.target, **config.arguments)
            return TasksetEnv(loaders.load_taskset(settings), config)
        except PalestraError:
            raise
        except (Exception, SystemExit) as error:
            raise UserCodeError(
                f"the verifiers environment {config.target!r} cannot be loaded: {text_of(error)}. It must be installed "
                "with all that it needs (pip install verifiers[…] or its own package), and be an environment or a "
                "taskset; its arguments are env.arguments"
            ) from error


BY_NAME: dict[str, type[Env]] = {"gymnasium": NamedGymEnv, "openenv": NamedOpenEnv, "verifiers": NamedVerifiersEnv}


def _library(name: str, extra: str = "") -> Any:
    with needs_extra("this", extra or name):
        return importlib.import_module(name)
