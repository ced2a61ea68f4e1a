"""Run the tool calls of one turn concurrently, each with a timeout; a failure becomes the call's result."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

from pydantic_core import ValidationError, to_jsonable_python

from palestra.agents.tools.tool import Tool
from palestra.core.calls import AttemptStuck, call_user_code
from palestra.core.errors import RolloutError, did_you_mean, text_of
from palestra.core.text import encodable, shorten
from palestra.core.types import ToolCall, ToolResult

MAX_ERROR_CHARS = 300
NO_SIGNALS = (
    "uses signals (signal.alarm, signal.setitimer or signal.signal), which work in the main thread alone, while tools "
    "run in other threads; leave them out, and limit a tool's time by rollout.tool_timeout_s"
)


class ArgumentError(Exception):
    """Arguments that do not fit the tool; its text is for the model to read."""


class NoText(Exception):
    """A tool returned something that has no text form."""


def read_arguments(tool: Tool, arguments: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments for `tool.fn`. Nothing is guessed: "3" is not an int."""
    properties: dict[str, Any] = tool.parameters.get("properties", {})
    required: Sequence[str] = tool.parameters.get("required", ())
    problems = []
    for key in required:
        # a default stands in even where the schema asks for the argument, as strict schemas do for all
        if key not in arguments and "default" not in properties.get(key, {}):
            problems.append(f"missing argument {key!r}")
    values: dict[str, Any] = {}
    for key, value in arguments.items():
        values[key] = value
        if key in tool.readers:
            try:
                # JSON mode: an Enum or a date may come as text, while strict keeps "3" from being an int
                values[key] = tool.readers[key].validate_json(json.dumps(value), strict=True)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                where = "".join(f"[{part!r}]" for part in first["loc"])
                problems.append(f"argument {key!r}{where}: {first['msg']}, got {_short(first['input'])}")
        elif key in properties:
            if problem := find_mismatch(value, properties[key], tool.parameters):
                problems.append(f"argument {key!r}: {problem}")
        elif tool.parameters.get("additionalProperties", False) is False:
            guess = did_you_mean(key, properties)
            problems.append(f"unknown argument {key!r}{f' ({guess.strip()})' if guess else ''}")
    if not problems:
        return values
    kinds = [
        f"{key}: {_kind(schema, tool.parameters)}{'' if key in required else ' (optional)'}"
        for key, schema in properties.items()
    ]
    takes = ", ".join(kinds) or "no arguments"
    raise ArgumentError("; ".join(problems).rstrip(".") + f". {tool.name} takes {takes}")


def find_mismatch(value: Any, schema: dict[str, Any], root: dict[str, Any] | None = None) -> str | None:
    """Reason why a JSON value does not fit a schema; None when it does. References lead into `root`.

    Nothing is downloaded, and keywords that could take very long are not checked: patterns and `uniqueItems`.
    """
    try:
        return next(map(_explain, _validator_class()(root or schema).descend(value, schema)), None)
    except Exception:  # a schema that is none: the tool itself decides
        return None


@cache
def _validator_class() -> Any:
    import jsonschema  # here: it takes 0.1 s
    import referencing

    base = jsonschema.Draft202012Validator
    is_integer = base.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)  # 1.0 is none

    def additional(validator: Any, allowed: Any, value: Any, schema: dict[str, Any]) -> Any:
        check = base.VALIDATORS["additionalProperties"]
        return () if "patternProperties" in schema else check(validator, allowed, value, schema)

    slow = ("pattern", "patternProperties", "unevaluatedProperties", "uniqueItems")
    keywords = {**dict.fromkeys(slow, lambda *_: ()), "additionalProperties": additional}
    cls = jsonschema.validators.extend(base, keywords, type_checker=is_integer)
    return partial(cls, registry=referencing.Registry())


def _explain(error: Any) -> str:
    """
    >>> print(find_mismatch([1, "x"], {"items": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}))
    [1] "x" is not of type 'integer' or [1] "x" is not of type 'null'
    """
    if error.context:  # of anyOf and oneOf
        return " or ".join(dict.fromkeys(map(_explain, error.context)))
    where = "".join(f"[{part!r}]" for part in error.absolute_path)
    return f"{where} {error.message.replace(repr(error.instance), _short(error.instance))}".strip()


def _kind(schema: dict[str, Any], root: dict[str, Any]) -> str:
    """The type that a schema takes, in a word or two: `integer or null` for an `int | None`."""
    if "$ref" in schema:
        target: Any = root
        for part in str(schema["$ref"]).removeprefix("#/").split("/"):
            target = target.get(part, {})
        return _kind(target, {})  # not further: a type may hold itself
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(_kind(option, root) for option in options))
    kind = schema.get("type", "any")
    return " or ".join(kind) if isinstance(kind, list) else str(kind)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "…"


async def run_calls(
    tools: Mapping[str, Tool], calls: Sequence[ToolCall], timeout_s: float, max_result_chars: int = 20_000
) -> list[ToolResult]:
    """The results of all calls, in their order. Errors are results that the model reads; only AttemptStuck is raised.

    The calls run concurrently; in a lane, one after the other.
    """
    if len(calls) == 1:
        return [await _run_call(tools, calls[0], timeout_s, max_result_chars)]
    return list(await asyncio.gather(*(_run_call(tools, call, timeout_s, max_result_chars) for call in calls)))


async def _run_call(tools: Mapping[str, Tool], call: ToolCall, timeout_s: float, max_chars: int) -> ToolResult:
    started = time.perf_counter()

    def failed(text: str, *, raised: bool = False) -> ToolResult:
        short = text if len(text) <= MAX_ERROR_CHARS else text[: MAX_ERROR_CHARS - 1] + "…"
        seconds = time.perf_counter() - started
        return ToolResult(call, encodable(f"Error: {short}"), ok=False, seconds=seconds, raised=raised)

    if call.error is not None:
        return ToolResult(call, shorten(encodable(f"Error: {call.error}"), max_chars), ok=False)
    tool = tools.get(call.name)
    if tool is None:
        known = f"The tools are: {', '.join(tools)}." if tools else "There are no tools."
        return failed(f"there is no tool {call.name!r}.{did_you_mean(call.name, tools)} {known}")
    try:
        function = partial(tool.fn, **read_arguments(tool, call.arguments))
        content = await call_user_code(call.name, function, limit_s=timeout_s, then=_text)
    except ArgumentError as problem:
        return failed(str(problem))
    except AttemptStuck:
        raise
    except RolloutError as error:
        match error.__cause__:
            case NoText(args=(problem,)):
                return failed(f"{call.name} returned {problem}", raised=True)
            case ValueError() as cause if "signal only works in main thread" in text_of(cause):
                return failed(f"{call.name} {NO_SIGNALS}", raised=True)
        return failed(str(error), raised=True)
    return ToolResult(call, shorten(content, max_chars), seconds=time.perf_counter() - started)


def _text(value: Any) -> str:
    """What the model reads of what a tool returned, which may be a generator or an object with a text of its own."""
    try:
        text = (
            value if isinstance(value, str) else json.dumps(to_jsonable_python(value, fallback=str), ensure_ascii=False)
        )
        return encodable(text)
    except Exception as error:
        raise NoText(f"{type(value).__name__}, which has no text form ({text_of(error)})") from error
