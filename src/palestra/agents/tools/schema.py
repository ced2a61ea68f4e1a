"""A typed Python function with a docstring -> the JSON schema of its arguments."""

from __future__ import annotations

import contextlib
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from weakref import WeakKeyDictionary

import docstring_parser

from palestra.core.errors import InputError

T = TypeVar("T")

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    Context = Annotated[T, "the state of an attempt"]
else:

    class Context:
        """The type of a tool's parameter that gets the state of the attempt; Context[Cart] is a Cart.

            @function_tool
            def add(item: str, cart: Context[Cart]) -> str:
                \"""Put an item into the cart.\"""
                cart.items.append(item)
                return f"{len(cart.items)} items"

            suite = EvalSuite.from_records(records, measures=[…], context_fn=lambda record: Cart())

        A model sees `add(item)`; each attempt has its own cart.
        """

        def __class_getitem__(cls, kind: Any) -> Any:
            return Annotated[kind, cls]


def is_context(annotation: Any) -> bool:
    """Whether a parameter of this type gets the attempt's context."""
    is_marked = typing.get_origin(annotation) is Annotated and Context in annotation.__metadata__
    return is_marked or annotation is Context


def parse_docstring(docstring: str) -> tuple[str, dict[str, str]]:
    """The description of a function, and of each parameter; for docstrings of Google, NumPy and Sphinx style.

    >>> parse_docstring("Add.\\n\\nArgs:\\n    a: The first number.")
    ('Add.', {'a': 'The first number.'})
    """
    parsed = docstring_parser.parse(docstring)
    texts: dict[str, str] = {}
    for parameter in parsed.params:
        for name in parameter.arg_name.split(","):  # NumPy: `a, b : int`
            texts[name.strip(" *")] = " ".join((parameter.description or "").split())
    return (parsed.description or "").strip(), texts


EXAMPLE = '''
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b'''


@dataclass(frozen=True)
class FunctionSchema:
    """The description of a function for a model, and the readers that turn JSON values into its arguments."""

    description: str
    parameters: dict[str, Any]
    readers: dict[str, TypeAdapter[Any]]
    context: str | None = None  # the parameter that the model does not see: it gets the state of an attempt


def function_schema(fn: Callable[..., Any]) -> FunctionSchema:
    """Describe `fn` by its type hints and docstring; what is missing raises PalestraError.

    Every attempt has its own copy of an environment and so its own bound methods: their schema is made once.
    """
    if (function := getattr(fn, "__func__", None)) is None:
        return _function_schema(fn)
    if function not in _OF_METHODS:
        _OF_METHODS[function] = _function_schema(fn)
    return _OF_METHODS[function]


_OF_METHODS: WeakKeyDictionary[Any, FunctionSchema] = WeakKeyDictionary()


def _function_schema(fn: Callable[..., Any]) -> FunctionSchema:
    from pydantic_core import PydanticSerializationError, to_jsonable_python

    name = getattr(fn, "__name__", type(fn).__name__)
    docstring = inspect.getdoc(fn)
    if not docstring or not docstring.strip():
        raise InputError(
            f"tool {name!r} has no docstring, so a model cannot know what it does. "
            f"Write one with a line for each parameter, for example:\n{EXAMPLE}"
        )
    if inspect.isasyncgenfunction(fn):
        raise InputError(f"tool {name!r} is an async generator, of which a model would see no item; return a list")
    description, texts = parse_docstring(docstring)
    try:
        hints = typing.get_type_hints(fn if inspect.isroutine(fn) else type(fn).__call__, include_extras=True)
    except (NameError, TypeError) as error:
        raise InputError(
            f"the type hints of tool {name!r} cannot be read: {error}. "
            "Define the types that it uses at the top of its module."
        ) from None
    properties: dict[str, Any] = {}
    definitions: dict[str, Any] = {}
    readers: dict[str, TypeAdapter[Any]] = {}
    required: list[str] = []
    context: str | None = None
    for parameter in inspect.signature(fn).parameters.values():
        key = parameter.name
        annotation = _annotation(parameter, hints, name)
        if is_context(annotation):
            if context is not None:
                raise InputError(f"tool {name!r} has two contexts, {context} and {key}; an attempt has one")
            context = key
            continue
        readers[key], schema = _reader(annotation, name, key)
        definitions |= schema.pop("$defs", {})
        annotated = [extra for extra in getattr(annotation, "__metadata__", ()) if isinstance(extra, str)]
        text = next(iter(annotated), None) or texts.get(key)  # of Annotated[int, "the text"], or of the docstring
        if text and "description" not in schema:
            schema["description"] = text
        if parameter.default is inspect.Parameter.empty:
            required.append(key)
        else:
            with contextlib.suppress(PydanticSerializationError):  # JSON cannot express every default
                schema["default"] = to_jsonable_python(parameter.default)
        properties[key] = schema
    parameters: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    if definitions:
        parameters["$defs"] = definitions
    parameters["additionalProperties"] = False
    return FunctionSchema(description, parameters, readers, context)


def _annotation(parameter: inspect.Parameter, hints: dict[str, Any], name: str) -> Any:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
        raise InputError(
            f"tool {name!r} has the parameter {str(parameter)!r}, which a model cannot fill by name. "
            f"Name each parameter, for example:\n{EXAMPLE}"
        )
    if parameter.name not in hints:
        raise InputError(
            f"parameter {parameter.name!r} of tool {name!r} has no type hint. Give it one, for example:\n{EXAMPLE}"
        )
    return hints[parameter.name]


def _reader(annotation: Any, name: str, key: str) -> tuple[TypeAdapter[Any], dict[str, Any]]:
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUserError

    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
        return adapter, _without_titles(adapter.json_schema())
    except (PydanticUserError, NameError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"parameter {key!r} of tool {name!r} has the type {annotation!r}, which has no JSON form ({reason}). "
            "Use str, int, float, bool, list, dict, Literal, an Enum, a dataclass or a pydantic model."
        ) from None


def _without_titles(schema: Any, names: bool = False) -> Any:
    """The schema without pydantic's titles, which only repeat the names. `names`: the keys here are names."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_titles(value, names=key in ("properties", "$defs") and not names)
        for key, value in schema.items()
        if names or key != "title"
    }
