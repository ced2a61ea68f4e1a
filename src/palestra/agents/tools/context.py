"""The state of one attempt, for tools that need some.

    @dataclass
    class Cart:
        items: list[str] = field(default_factory=list)

    @function_tool
    def add(item: str, cart: Context[Cart]) -> str:
        \"""Put an item into the cart.\"""
        cart.items.append(item)
        return f"{len(cart.items)} items"

    suite = EvalSuite.from_records(records, measures=[…], context_fn=lambda record: Cart())

A model sees `add(item)`; each attempt has a cart of its own.
"""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    Context = Annotated[T, "the state of an attempt"]
else:

    class Context:
        """The type of a tool's parameter that gets the state of the attempt; Context[Cart] is a Cart."""

        def __class_getitem__(cls, kind: Any) -> Any:
            return Annotated[kind, cls]


def is_context(annotation: Any) -> bool:
    """Whether a parameter of this type gets the attempt's context."""
    is_marked = typing.get_origin(annotation) is Annotated and Context in annotation.__metadata__
    return is_marked or annotation is Context
