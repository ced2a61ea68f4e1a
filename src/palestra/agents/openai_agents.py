"""Agents of the openai-agents SDK, taken as they are; the SDK itself is never imported."""

from __future__ import annotations

from typing import Any

from palestra.agents.agent import Agent
from palestra.core.errors import PalestraError

_UNTRAINABLE = {
    "handoffs": "handoffs to other agents",
    "mcp_servers": "MCP servers",
    "output_type": "an output type",
    "input_guardrails": "input guardrails",
    "output_guardrails": "output guardrails",
    "prompt": "a stored prompt",
}


def as_agent(obj: Any) -> Agent:
    """Our Agent, or one of the openai-agents SDK, as our Agent."""
    if isinstance(obj, Agent):
        return obj
    if not all(hasattr(obj, key) for key in ("name", "instructions", "tools")):
        raise PalestraError(
            f"expected an agent, got {type(obj).__name__}. Pass palestra.Agent(name, model, instructions, tools) "
            "or an Agent of the openai-agents SDK."
        )
    for key, words in _UNTRAINABLE.items():
        if getattr(obj, key, None):
            raise PalestraError(
                f"agent {obj.name!r} has {words} ({key}), which training would not see. "
                f"Leave {key} out of the agent that you train."
            )
    return Agent(obj.name, _model_name(obj), obj.instructions or "", obj.tools)


def _model_name(obj: Any) -> str | None:
    model = getattr(obj, "model", None)
    if model is None or isinstance(model, str):
        return model
    name = getattr(model, "model", None)  # the SDK's model objects keep their name there
    if not isinstance(name, str):
        raise PalestraError(
            f"agent {obj.name!r} has a model of type {type(model).__name__} without a name; pass the name as a string"
        )
    return name
