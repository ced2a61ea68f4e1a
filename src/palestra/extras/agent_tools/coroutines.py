"""The ten tools as coroutines that answer JSON text, as agent frameworks register them; over the same session."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import palestra.extras.agent_tools as rl_tools
from palestra.extras.agent_tools.tools import call_in_thread


def __getattr__(name: str) -> Callable[..., Coroutine[Any, Any, str]]:
    if name not in rl_tools.TOOL_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    function = getattr(rl_tools, name)

    @wraps(function)
    async def call(*args: Any, **kwargs: Any) -> str:
        arguments = inspect.signature(function).bind(*args, **kwargs).arguments
        return json.dumps(await call_in_thread(rl_tools.this_session(), name, arguments))

    return call
