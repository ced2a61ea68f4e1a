"""The settings of environments that run code."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from palestra.core.errors import UnsupportedError
from palestra.envs.env import EnvConfig
from palestra.envs.sandbox.isolation import CONTAINER_IMAGE, SandboxLimits
from palestra.envs.sandbox.sandbox import Sandbox, choose_isolation, why_not

MAX_SANDBOXES = 128  # attempts at a time: each may fill its memory and its tmpfs


class SandboxConfig(EnvConfig):
    """An environment that runs the model's code: how that is isolated."""

    isolation: Literal["auto", "bubblewrap", "namespaces", "podman", "docker"] = Field(
        "auto", description="auto: bubblewrap where it is installed, otherwise namespaces"
    )
    container_image: str = Field(CONTAINER_IMAGE, description="for podman and docker; it needs python3")
    allow_unsandboxed: bool = Field(False, description="where nothing isolates, run the model's code as you")

    def check(self) -> None:
        """Refuse a machine on which the model's code cannot be isolated, before anything else is done."""
        if self.isolation == "auto":
            choose_isolation(self.allow_unsandboxed)
        elif reason := why_not(self.isolation, self.container_image):
            raise UnsupportedError(f"isolation={self.isolation} does not work here: {reason}")

    def sandbox(self, limits: SandboxLimits) -> Sandbox:
        kind = choose_isolation(self.allow_unsandboxed) if self.isolation == "auto" else self.isolation
        return Sandbox(limits, kind, image=self.container_image)
