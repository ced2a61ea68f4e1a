"""Agents of the openai-agents SDK, taken as they are; the SDK itself is never imported.

Features that training cannot reproduce are rejected with an error that names them and an alternative.
"""

from __future__ import annotations

import inspect
from typing import Any

from palestra.agents.agent import Agent
from palestra.agents.programs import function_agent
from palestra.core.errors import InputError, UnsupportedError

# attribute -> (what it is, what to do instead)
_UNTRAINABLE = {
    "handoffs": ("handoffs to other agents", "Train each agent on its own"),
    "mcp_servers": ("MCP servers", "Train palestra.Agent(…, mcp_servers=[their commands])"),
    "output_type": ("an output type", "Ask for that form in the instructions, and check it in a measure"),
    "input_guardrails": ("input guardrails", "Leave them out of the agent that you train; the one you deploy has them"),
    "output_guardrails": ("output guardrails", "Leave them out of the agent that you train, and punish in a measure"),
    "prompt": ("a stored prompt", "Write it into the instructions"),
    "hooks": ("hooks", "Leave them out of the agent that you train; a measure sees every call and result"),
}

# Of ModelSettings: what is ours to set under another name, and what changes nothing that the model reads or says.
_OURS = {"temperature": "rollout.temperature", "top_p": "rollout.top_p", "max_tokens": "rollout.max_new_tokens"}
_HARMLESS = set(
    "metadata store prompt_cache_retention prompt_cache_options include_usage preserve_raw_usage response_include "
    "top_logprobs retry timeout extra_headers".split()
)
_HOW_IT_IS = {"tool_choice": "auto", "parallel_tool_calls": True}  # values that say what training does anyway
_OF_THE_DEFAULT_MODEL = {"reasoning", "verbosity"}  # the SDK sets them where no model is named


def as_agent(obj: Any) -> Agent:
    """Our Agent, one of the openai-agents SDK, or a function with its own loop, as our Agent."""
    if isinstance(obj, Agent):
        return obj
    if inspect.isroutine(obj):
        return function_agent(obj)
    if not all(hasattr(obj, key) for key in ("name", "instructions", "tools")):
        raise InputError(
            f"expected an agent, got {type(obj).__name__}. Pass palestra.Agent(name, model, instructions, tools), "
            "an Agent of the openai-agents SDK, command_agent([…]), or a function (case, base_url, api_key)."
        )
    for key, (words, remedy) in _UNTRAINABLE.items():
        if getattr(obj, key, None):
            raise UnsupportedError(f"agent {obj.name!r} has {words} ({key}), which training would not see. {remedy}.")
    behavior = getattr(obj, "tool_use_behavior", "run_llm_again")
    if behavior != "run_llm_again":
        raise UnsupportedError(
            f"agent {obj.name!r} has tool_use_behavior={behavior!r}; in training the model always reads its tools' "
            "results and answers. Use 'run_llm_again' in the agent that you train."
        )
    settings, model = getattr(obj, "model_settings", None), getattr(obj, "model", None)
    ignored = _HARMLESS | (_OF_THE_DEFAULT_MODEL if model is None else set())
    for key, value in vars(settings).items() if settings is not None else ():
        if value is None or key in ignored or _HOW_IT_IS.get(key) == value:
            continue
        instead = f"Set {_OURS[key]} in the config instead" if key in _OURS else "Training has no such setting"
        raise UnsupportedError(
            f"agent {obj.name!r} has model_settings.{key}={value!r}, which training would not keep. {instead}, and "
            "train agent.clone(model_settings=ModelSettings())."
        )
    # the SDK's model objects keep their name in `model`
    name = model if model is None or isinstance(model, str) else getattr(model, "model", None)
    if (name is None and model is not None) or not isinstance(name, str | None):
        raise InputError(
            f"agent {obj.name!r} has a model of type {type(model).__name__} without a name; pass the name as a string"
        )
    return Agent(obj.name, name, obj.instructions or "", obj.tools)
