"""The ten `rl_*` tools as Python functions, over one session for this program. `RlTools()` is a session of your own."""

from __future__ import annotations

from functools import cache
from typing import Any

from palestra.faces.rl_tools.answers import Answer
from palestra.faces.rl_tools.requirements import check_rl_api_keys, check_rl_python_version, get_missing_keys
from palestra.faces.rl_tools.session import TOOL_NAMES, JsonValue, RlTools, all_tools

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


@cache
def _session() -> RlTools:
    return RlTools()


def rl_list_environments() -> Answer:
    """List the environments that a model can be trained on."""
    return _session().rl_list_environments()


def rl_select_environment(name: str) -> Answer:
    """Select the environment to train on, and load its settings."""
    return _session().rl_select_environment(name)


def rl_get_current_config() -> Answer:
    """Show which settings may be edited, and which are locked."""
    return _session().rl_get_current_config()


def rl_edit_config(field: str, value: JsonValue) -> Answer:
    """Change one setting of the training."""
    return _session().rl_edit_config(field, value)


def rl_start_training() -> Answer:
    """Start a training on the selected environment; it outlives this program."""
    return _session().rl_start_training()


def rl_check_status(run_id: str) -> Answer:
    """Look how a training is doing."""
    return _session().rl_check_status(run_id)


def rl_stop_training(run_id: str) -> Answer:
    """Stop a training, with a checkpoint."""
    return _session().rl_stop_training(run_id)


def rl_get_results(run_id: str) -> Answer:
    """Get the metrics of a training and the path of its weights."""
    return _session().rl_get_results(run_id)


def rl_list_runs() -> Answer:
    """List all trainings, also those of earlier programs."""
    return _session().rl_list_runs()


def rl_test_inference(num_steps: int = 3, group_size: int = 16, models: list[str] | None = None) -> Answer:
    """Let models attempt problems of the selected environment, without training."""
    return _session().rl_test_inference(num_steps, group_size, models)


def tool_schemas() -> list[dict[str, Any]]:
    """The schemas of the ten tools, in the form of OpenAI's function calling."""
    return [tool.schema for tool in all_tools().values()]
