"""The ten `rl_*` tools with which an agent starts, watches and compares trainings.

The names below are the tools as Python functions, over one session for this program; `RlTools()` is a separate session.
`mcp_server` and `http_api` serve the same tools. `launcher` starts runs for the dashboard with the same checks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Concatenate, ParamSpec

from palestra.agent_tools import tools
from palestra.agent_tools.answers import Answer
from palestra.agent_tools.requirements import check_rl_api_keys, check_rl_python_version, get_missing_keys
from palestra.agent_tools.tools import TOOLS, Call, RlTools

__all__ = [
    "TOOL_NAMES",
    "RlTools",
    "check_rl_api_keys",
    "check_rl_python_version",
    "get_missing_keys",
    "rl_check_status",
    "rl_edit_config",
    "rl_get_current_config",
    "rl_get_results",
    "rl_list_environments",
    "rl_list_runs",
    "rl_select_environment",
    "rl_start_training",
    "rl_stop_training",
    "rl_test_inference",
    "tool_schemas",
]

TOOL_NAMES = tuple(TOOLS)
Arguments = ParamSpec("Arguments")


@cache
def this_session() -> RlTools:
    """The session of this program's functions."""
    return RlTools()


def _function(tool: Callable[Concatenate[Call, Arguments], Any]) -> Callable[Arguments, Answer]:
    """A tool as a function of this program's session."""

    @wraps(tool)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        method: Callable[Arguments, Answer] = getattr(this_session(), tool.__name__)
        return method(*args, **kwargs)

    signature = inspect.signature(tool)
    vars(call)["__signature__"] = signature.replace(parameters=list(signature.parameters.values())[1:])
    return call


rl_list_environments = _function(tools.rl_list_environments)
rl_select_environment = _function(tools.rl_select_environment)
rl_get_current_config = _function(tools.rl_get_current_config)
rl_edit_config = _function(tools.rl_edit_config)
rl_start_training = _function(tools.rl_start_training)
rl_check_status = _function(tools.rl_check_status)
rl_stop_training = _function(tools.rl_stop_training)
rl_get_results = _function(tools.rl_get_results)
rl_list_runs = _function(tools.rl_list_runs)
rl_test_inference = _function(tools.rl_test_inference)


def tool_schemas() -> list[dict[str, Any]]:
    """The schemas of the ten tools, in the form of OpenAI's function calling."""
    return [tool.schema for tool in TOOLS.values()]
