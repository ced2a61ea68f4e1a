"""Palestra: make tool-using language-model agents better by reinforcement learning."""

from __future__ import annotations

from importlib import import_module

import palestra.core.moved  # noqa: F401  # imports by the paths of earlier releases work

__version__ = "0.2.0"

TYPE_CHECKING = False  # as type checkers know it, without the cost of importing typing
if TYPE_CHECKING:
    from palestra.agents.agent import Agent
    from palestra.agents.programs import command_agent
    from palestra.agents.tools.mcp_client import McpServer
    from palestra.agents.tools.schema import Context
    from palestra.agents.tools.tool import Tool, function_tool
    from palestra.api import GRPOTrainer, GRPOTrainingConfig, GRPOTrainingResult, evaluate, train_grpo, train_sft
    from palestra.core.errors import PalestraError
    from palestra.envs.env import Env, EnvConfig
    from palestra.envs.user_simulator import UserSimulator
    from palestra.evals.judge import judge, ruler
    from palestra.evals.measures import fail_reason, measure, pass_reason, turn_scores
    from palestra.suite import EvalSuite

__all__ = [
    "Agent", "Context", "Env", "EnvConfig", "EvalSuite", "GRPOTrainer", "GRPOTrainingConfig", "GRPOTrainingResult",
    "McpServer", "PalestraError", "Tool", "UserSimulator", "command_agent", "evaluate", "fail_reason", "function_tool",
    "judge", "measure", "pass_reason", "ruler", "train_grpo", "train_sft", "turn_scores",
]  # fmt: skip
_MODULES = {
    "agents.agent": "Agent",
    "agents.programs": "command_agent",
    "agents.tools.mcp_client": "McpServer",
    "agents.tools.schema": "Context",
    "agents.tools.tool": "Tool function_tool",
    "api": "GRPOTrainer GRPOTrainingConfig GRPOTrainingResult evaluate train_grpo train_sft",
    "core.errors": "PalestraError",
    "envs.env": "Env EnvConfig",
    "envs.user_simulator": "UserSimulator",
    "evals.judge": "judge ruler",
    "evals.measures": "fail_reason measure pass_reason turn_scores",
    "suite": "EvalSuite",
}
_HOMES = {name: f"palestra.{module}" for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    """Load a public name when it is first used: importing palestra itself costs nothing."""
    if name == "improve":
        raise AttributeError("palestra.improve was removed; PyPI's gepa evolves texts, scored by palestra.evaluate")
    if name not in _HOMES:
        raise AttributeError(f"module 'palestra' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
