"""The settings of environments that run code."""

from __future__ import annotations

from pydantic import Field

from palestra.envs.env import EnvConfig
from palestra.envs.sandbox.isolation import SandboxLimits
from palestra.envs.sandbox.sandbox import Sandbox, choose_isolation

MAX_SANDBOXES = 128  # attempts at a time: each may fill its memory and its tmpfs


class SandboxConfig(EnvConfig):
    """An environment that runs the model's code."""

    allow_unsandboxed: bool = Field(False, description="where nothing isolates, run the model's code as you")

    def check(self) -> None:
        """Refuse a machine on which the model's code cannot be isolated, before anything else is done."""
        choose_isolation(self.allow_unsandboxed)

    def sandbox(self, limits: SandboxLimits) -> Sandbox:
        return Sandbox(limits, allow_unsandboxed=self.allow_unsandboxed)
