"""The ten tools as coroutines that answer JSON text, as agent frameworks register them; over the same session."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import palestra.extras.agent_tools as rl_tools
from palestra.extras.agent_tools.clients import call_in_thread, tool_function


def __getattr__(name: str) -> Callable[..., Coroutine[Any, Any, str]]:
    function = tool_function(name, rl_tools.this_session)

    @wraps(function)
    async def call(*args: Any, **kwargs: Any) -> str:
        arguments = inspect.signature(function).bind(*args, **kwargs).arguments
        return json.dumps(await call_in_thread(rl_tools.this_session(), name, arguments))

    return call
