"""The ten tools as coroutines that answer JSON text, as agent frameworks register them; over the same session."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

from palestra import agent_tools as rl_tools
from palestra.agent_tools.clients import call_in_thread


def _coroutine(function: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, str]]:
    @wraps(function)
    async def call(*args: Any, **kwargs: Any) -> str:
        arguments = inspect.signature(function).bind(*args, **kwargs).arguments
        return json.dumps(await call_in_thread(rl_tools.this_session(), function.__name__, arguments))

    return call


rl_list_environments = _coroutine(rl_tools.rl_list_environments)
rl_select_environment = _coroutine(rl_tools.rl_select_environment)
rl_get_current_config = _coroutine(rl_tools.rl_get_current_config)
rl_edit_config = _coroutine(rl_tools.rl_edit_config)
rl_start_training = _coroutine(rl_tools.rl_start_training)
rl_check_status = _coroutine(rl_tools.rl_check_status)
rl_stop_training = _coroutine(rl_tools.rl_stop_training)
rl_get_results = _coroutine(rl_tools.rl_get_results)
rl_list_runs = _coroutine(rl_tools.rl_list_runs)
rl_test_inference = _coroutine(rl_tools.rl_test_inference)
