"""A tool: a function that a model may call, with the JSON schema of its arguments."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import textwrap
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any, overload

from palestra.agents.tools.schema import function_schema
from palestra.core.errors import InputError, UnsupportedError

_NO_DEFAULT = inspect.Parameter.empty


@dataclass(frozen=True)
class Tool:
    """A named function with the JSON schema of its arguments. Calling the tool calls the function.

    `readers` turn one JSON value each into what the function wants (an Enum, a dataclass, …);
    arguments without a reader are checked against the schema and passed on as they are.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    fn: Callable[..., Any]
    readers: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    context: str | None = None  # the parameter that gets the state of an attempt

    def bind(self, context: Any) -> Tool:
        """The tool of one attempt, whose state is `context`."""
        if self.context is None:
            return self
        return replace(self, fn=partial(self.fn, **{self.context: context}), context=None)

    @property
    def needs_context(self) -> bool:
        """Whether it cannot be called without having been bound."""
        return self.context is not None and inspect.signature(self.fn).parameters[self.context].default is _NO_DEFAULT

    @property
    def schema(self) -> dict[str, Any]:
        """The form that chat templates and OpenAI-style servers take."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @property
    def params_json_schema(self) -> dict[str, Any]:
        """The parameters by their name in openai-agents."""
        return self.parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)


@overload
def function_tool(fn: Callable[..., Any], /) -> Tool: ...


@overload
def function_tool(
    *,
    name: str | None = None,
    description: str | None = None,
    name_override: str | None = None,
    description_override: str | None = None,
) -> Callable[[Callable[..., Any]], Tool]: ...


def function_tool(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    name_override: str | None = None,
    description_override: str | None = None,
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a tool of a typed function with a docstring; as `@function_tool` or `@function_tool(name=…)`.

    `name_override` and `description_override` are the names of openai-agents for `name` and `description`.
    """

    def make(function: Callable[..., Any]) -> Tool:
        if isinstance(function, type) or not callable(function):
            raise InputError(f"a tool is made of a function, got {function!r}; pass the function itself")
        schema = function_schema(function)
        own_name = getattr(function, "__name__", type(function).__name__)
        return Tool(
            name=name or name_override or own_name,
            description=description or description_override or schema.description,
            parameters=schema.parameters,
            fn=function,
            readers=schema.readers,
            context=schema.context,
        )

    return make if fn is None else make(fn)


def as_tool(obj: Any) -> Tool:
    """Our Tool, a typed function, or a FunctionTool of the openai-agents SDK, as our Tool."""
    if isinstance(obj, Tool):
        return obj
    if hasattr(obj, "on_invoke_tool") and hasattr(obj, "params_json_schema"):
        return from_openai_agents(obj)
    if callable(obj):
        return function_tool(obj)
    raise InputError(
        f"{obj!r} of type {type(obj).__name__} is not a tool. Pass a typed function with a docstring, "
        "a @function_tool, or a FunctionTool of openai-agents (hosted tools run only on their provider's servers)."
    )


def tools_by_name(tools: Iterable[Tool]) -> dict[str, Tool]:
    """The tools under their names; two of one name raise PalestraError."""
    named: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in named:
            raise InputError(
                f"two tools are named {tool.name!r}, so a call could mean either. "
                "Rename one: @function_tool(name='another_name')."
            )
        named[tool.name] = tool
    return named


# What a FunctionTool of openai-agents may have that training could not keep -> why.
_REFUSED = {
    "needs_approval": "asks a person before it runs, which is impossible during training",
    "tool_input_guardrails": "has guardrails, which run only in the SDK's own loop",
    "tool_output_guardrails": "has guardrails, which run only in the SDK's own loop",
    "defer_loading": "is loaded on demand, which only the SDK's own loop does",
    "allowed_callers": "names who may call it, which only the SDK's own loop keeps",
}
_SDK_FAILURE = "An error occurred while running the tool"


def from_openai_agents(sdk_tool: Any) -> Tool:
    """A FunctionTool of openai-agents: it is called with the SDK's context and the arguments as JSON text."""
    for key, reason in _REFUSED.items():
        if getattr(sdk_tool, key, None):
            raise UnsupportedError(
                f"tool {sdk_tool.name!r} {reason} ({key}). Leave {key} out of the tool that you train with, and let it "
                "change nothing that matters; the agent that you deploy keeps it"
            )
    if callable(getattr(sdk_tool, "is_enabled", True)):
        raise UnsupportedError(
            f"tool {sdk_tool.name!r} is enabled by a function (is_enabled), which would be asked in no training; "
            "use True or False in the agent that you train"
        )
    agent = getattr(sdk_tool, "_agent_instance", None)
    if agent is not None and (agent.model is None or isinstance(agent.model, str)):
        raise UnsupportedError(
            f"tool {sdk_tool.name!r} is the agent {agent.name!r} (as_tool), which would ask the SDK's own provider at "
            "each call. Give that agent a model object, such as OpenAIChatCompletionsModel(…), or give its tools to "
            "the agent that you train"
        )
    limit_s = getattr(sdk_tool, "timeout_seconds", None)

    async def invoke(palestra_context: Any, **arguments: Any) -> Any:
        text = json.dumps(arguments, ensure_ascii=False)
        async with asyncio.timeout(limit_s):
            result = await sdk_tool.on_invoke_tool(_sdk_context(sdk_tool, palestra_context, text), text)
        if isinstance(result, str) and result.startswith(_SDK_FAILURE):
            raise RuntimeError(result)  # the SDK reports its tools' exceptions as ordinary text
        return result

    # where the SDK does not show the function, it counts as one without a parameter for the context
    inner = getattr(sdk_tool.on_invoke_tool, "_invoke_tool_impl", sdk_tool.on_invoke_tool)
    shown = inspect.getclosurevars(inner).nonlocals.get("schema") if inspect.isfunction(inner) else None
    fn = invoke if getattr(shown, "takes_context", False) else partial(invoke, palestra_context=None)
    schema = dict(sdk_tool.params_json_schema)
    return Tool(sdk_tool.name, sdk_tool.description or "", schema, fn, context="palestra_context")


def _sdk_context(sdk_tool: Any, context: Any, arguments: str) -> Any:
    """The context that the SDK's own tools ask for; its fields differ from version to version."""
    try:
        from agents.tool_context import ToolContext
    except ImportError:
        return None
    values = {"context": context, "tool_name": sdk_tool.name, "tool_call_id": "call_0", "tool_arguments": arguments}
    known = inspect.signature(ToolContext).parameters
    return ToolContext(**{key: value for key, value in values.items() if key in known})


_CHANGES = set(
    "append appendleft extend insert pop popitem popleft remove discard clear add update setdefault sort".split()
)


def shared_state(fn: Callable[..., Any]) -> list[str]:
    """The names of the variables outside of `fn` that it changes, as far as its own source shows it.

    >>> stock = {"lamp": 3}
    >>> def take(item):
    ...     stock[item] -= 1
    >>> shared_state(take)      # doctest: +SKIP
    ['stock']
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(fn))).body[0]
        code, outer = fn.__code__, {}
        if inspect.ismethod(fn):
            outer[code.co_varnames[0]] = fn.__self__
        cells = zip(code.co_freevars, getattr(fn, "__closure__", None) or (), strict=False)
        outer |= {name: cell.cell_contents for name, cell in cells}
        outer |= {name: fn.__globals__[name] for name in code.co_names if name in fn.__globals__}
    except (OSError, TypeError, AttributeError, SyntaxError, IndexError):
        return []  # no source, or no function of Python
    outer = {name: value for name, value in outer.items() if not isinstance(value, ModuleType)}
    return list(dict.fromkeys(name for node in ast.walk(tree) for name in _changed(node, outer)))


def _changed(node: ast.AST, outer: dict[str, Any]) -> Iterator[str]:
    match node:
        case ast.Global(names=names):  # it is needed to assign, not to read
            yield from names
        case ast.Nonlocal(names=names):
            yield from (name for name in names if name in outer)
        case ast.Subscript(ctx=ast.Store() | ast.Del()) | ast.Attribute(ctx=ast.Store() | ast.Del()):
            if (name := _root(node)) in outer:
                yield name
        case ast.Call(func=ast.Attribute(attr=attr, value=value)) if attr in _CHANGES:
            if isinstance(_value(value, outer), list | dict | set | bytearray | deque):
                yield _root(value)


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _value(node: ast.AST, outer: dict[str, Any]) -> Any:
    """The value of an expression, without running any code: `stock`, `self.items`, or an entry of such a thing."""
    match node:
        case ast.Name(id=name):
            return outer.get(name)
        case ast.Attribute(value=owner, attr=attr):
            return getattr(_value(owner, outer), "__dict__", {}).get(attr)
        case ast.Subscript(value=owner):
            return _value(owner, outer)  # an entry of a shared container may well be one, too
    return None
