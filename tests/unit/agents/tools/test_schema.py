import enum
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import BaseModel
from typing_extensions import TypedDict

from palestra.agents.tools.schema import function_schema
from palestra.core.errors import PalestraError


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    title: str = ""


class Place(TypedDict):
    city: str


class Order(BaseModel):
    item: str
    where: Point


def property_of(annotation: Any) -> dict[str, Any]:
    def tool(value):
        """Take a value."""

    tool.__annotations__ = {"value": annotation}
    return function_schema(tool).parameters["properties"]["value"]


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (str, {"type": "string"}),
        (int, {"type": "integer"}),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (dict[str, float], {"type": "object", "additionalProperties": {"type": "number"}}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Optional[int], {"anyOf": [{"type": "integer"}, {"type": "null"}]}),  # noqa: UP045
        (int | str, {"anyOf": [{"type": "integer"}, {"type": "string"}]}),
        (Colour, {"type": "string", "enum": ["red", "blue"]}),
        (Annotated[int, "How many."], {"type": "integer", "description": "How many."}),
        (Place, {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}),
    ],
    ids=str,
)
def test_type_hints_become_json_schema(annotation, expected):
    assert property_of(annotation) == expected


def test_a_dataclass_keeps_a_field_named_title_and_loses_pydantics_titles():
    assert property_of(Point) == {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "title": {"type": "string", "default": ""}},
        "required": ["x"],
    }


def test_nested_models_are_defined_at_the_root_where_their_references_point():
    def tool(orders: list[Order]) -> None:
        """Take orders."""

    parameters = function_schema(tool).parameters
    assert parameters["properties"]["orders"]["items"] == {"$ref": "#/$defs/Order"}
    assert set(parameters["$defs"]) == {"Order", "Point"}


def test_parameters_with_defaults_are_not_required():
    def tool(a: int, b: int = 2, c: Colour = Colour.RED) -> None:
        """Take three."""

    parameters = function_schema(tool).parameters
    assert parameters["required"] == ["a"]
    assert parameters["properties"]["b"]["default"] == 2
    assert parameters["properties"]["c"]["default"] == "red"
    assert parameters["additionalProperties"] is False


def test_parameter_names_that_pydantic_keeps_for_itself_are_allowed():
    def tool(schema: str, model_config: int, json: bool) -> None:
        """Take odd names."""

    assert list(function_schema(tool).parameters["properties"]) == ["schema", "model_config", "json"]


def test_a_bound_method_is_a_tool_without_self():
    class Shop:
        def price(self, item: str) -> float:
            """Look a price up.

            Args:
                item: Its name.
            """
            return 1.0

    schema = function_schema(Shop().price)
    assert schema.parameters["properties"] == {"item": {"type": "string", "description": "Its name."}}


def test_a_function_without_docstring_is_refused_with_an_example():
    def mute(a: int) -> int:
        return a

    with pytest.raises(PalestraError, match=r"(?s)'mute' has no docstring.*Args:"):
        function_schema(mute)


def test_a_parameter_without_type_hint_is_named_in_the_refusal():
    def half_typed(a: int, b) -> int:
        """Add."""
        return a + b

    with pytest.raises(PalestraError, match=r"(?s)'b' of tool 'half_typed' has no type hint.*def add\(a: int"):
        function_schema(half_typed)


def test_star_arguments_are_refused():
    def many(*numbers: int) -> int:
        """Add."""
        return sum(numbers)

    with pytest.raises(PalestraError, match="cannot fill by name"):
        function_schema(many)


def test_a_type_without_json_form_is_refused_by_name():
    class Socket:
        pass

    def send(socket: Socket) -> None:
        """Send."""

    with pytest.raises(PalestraError, match=r"'socket' of tool 'send'.*no JSON form"):
        function_schema(send)


def test_a_type_hint_that_cannot_be_resolved_is_refused():
    def lost(a: "Nowhere") -> None:  # noqa: F821
        """Be lost."""

    with pytest.raises(PalestraError, match=r"'lost' cannot be read.*Nowhere"):
        function_schema(lost)


def test_the_schema_of_a_method_is_made_once_for_all_copies_of_its_object():
    class Shop:
        def price(self, item: str) -> int:
            """The price of an item.

            Args:
                item: Its name.
            """
            return len(item)

    first, second = function_schema(Shop().price), function_schema(Shop().price)
    assert first is second
    assert list(first.parameters["properties"]) == ["item"]


def test_an_async_generator_is_refused() -> None:
    async def numbers():
        """Count."""
        yield 1

    with pytest.raises(PalestraError, match="'numbers' is an async generator"):
        function_schema(numbers)
