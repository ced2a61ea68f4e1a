"""Triton's interpreter, without a search through triton.language at every call of a device function: a third faster.

Import it in a process that runs kernels in the interpreter.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter

_patched: set[int] = set()  # globals of functions whose triton.language calls the interpreter's functions


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    if id(self.fn.__globals__) not in _patched:  # the kernel's own call restores only what it has patched
        interpreter._patch_lang(self.fn)
        _patched.add(id(self.fn.__globals__))
    function = self.rewrite()
    try:
        return function(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


if "_patch_lang" in interpreter.InterpretedFunction.__call__.__code__.co_names:
    interpreter.InterpretedFunction.__call__ = _call
