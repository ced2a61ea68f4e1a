"""The sandbox for code that a model wrote."""

from palestra.envs.sandbox.isolation import PYTHON, Isolation, SandboxLimits
from palestra.envs.sandbox.sandbox import CommandResult, Sandbox

__all__ = ["PYTHON", "CommandResult", "Isolation", "Sandbox", "SandboxLimits"]
