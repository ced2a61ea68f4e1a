import enum
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import BaseModel
from typing_extensions import TypedDict

from palestra.agents.tools.schema import function_schema, parse_docstring
from palestra.core.errors import InputError


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


TITLE = {"type": "string", "default": ""}  # a field of this name; pydantic's own titles are left out


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
        (Point, {"type": "object", "properties": {"x": {"type": "integer"}, "title": TITLE}, "required": ["x"]}),
    ],
    ids=str,
)
def test_type_hints_become_json_schema(annotation, expected):
    assert property_of(annotation) == expected


def test_nested_models_are_defined_at_the_root_where_their_references_point():
    def tool(orders: list[Order]) -> None:
        """Take orders."""

    parameters = function_schema(tool).parameters
    assert parameters["properties"]["orders"]["items"] == {"$ref": "#/$defs/Order"}
    assert set(parameters["$defs"]) == {"Order", "Point"}


def test_parameters_with_defaults_are_not_required():
    def tool(schema: str, model_config: int = 2, json: Colour = Colour.RED) -> None:
        """Take names that pydantic keeps for itself."""

    parameters = function_schema(tool).parameters
    assert parameters["required"] == ["schema"]
    assert parameters["properties"]["model_config"]["default"] == 2
    assert parameters["properties"]["json"]["default"] == "red"
    assert parameters["additionalProperties"] is False


class Shop:
    def price(self, item: str) -> float:
        """Look a price up.

        Args:
            item: Its name.
        """
        return 1.0


def test_a_bound_method_is_a_tool_without_self_described_once_for_all_objects():
    schema = function_schema(Shop().price)
    assert schema.parameters["properties"] == {"item": {"type": "string", "description": "Its name."}}
    assert function_schema(Shop().price) is schema


def mute(a: int) -> int:
    return a


def half_typed(a: int, b) -> int:
    """Add."""
    return a + b


def many(*numbers: int) -> int:
    """Add."""
    return sum(numbers)


def send(socket: Shop) -> None:
    """Send."""


def lost(a: "Nowhere") -> None:  # noqa: F821
    """Be lost."""


async def numbers():
    """Count."""
    yield 1


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (mute, r"(?s)'mute' has no docstring.*Args:"),
        (half_typed, r"(?s)'b' of tool 'half_typed' has no type hint.*def add\(a: int"),
        (many, "cannot fill by name"),
        (send, r"'socket' of tool 'send'.*no JSON form"),
        (lost, r"'lost' cannot be read.*Nowhere"),
        (numbers, "'numbers' is an async generator"),
    ],
)
def test_a_function_that_cannot_be_described_is_refused_by_name(fn, words):
    with pytest.raises(InputError, match=words):
        function_schema(fn)


GOOGLE = """Look a price up.

    Prices are in euro.

    Args:
        item (str): The item's name,
            as the catalogue has it.
        count: How many. Default: one.

    Returns:
        The price.
    """
NUMPY = """Look a price up.

    Prices are in euro.

    Parameters
    ----------
    item : str
        The item's name,
        as the catalogue has it.
    count : int, optional
        How many. Default: one.

    Returns
    -------
    float
        The price.
    """
SPHINX = """Look a price up.

    Prices are in euro.

    :param str item: The item's name,
        as the catalogue has it.
    :param count: How many. Default: one.
    :type count: int
    :returns: The price.
    """


PARAMETERS = {"item": "The item's name, as the catalogue has it.", "count": "How many. Default: one."}
PRICE = ("Look a price up.\n\nPrices are in euro.", PARAMETERS)


@pytest.mark.parametrize(
    ("docstring", "parsed"),
    [
        (GOOGLE, PRICE),
        (NUMPY, PRICE),
        (SPHINX, PRICE),
        ("Say hello. Note: politely.", ("Say hello. Note: politely.", {})),
        ("Add.\n\nParameters\n----------\na, b : int\n    A number.", ("Add.", {"a": "A number.", "b": "A number."})),
        ("Halve.\n\nArgs:\n    a: All.\n\nRaises:\n    ValueError: It is odd.", ("Halve.", {"a": "All."})),
        (
            "Write.\n\nArgs:\n    note: What.\n    returns: Whether.",
            ("Write.", {"note": "What.", "returns": "Whether."}),
        ),
    ],
    ids=["google", "numpy", "sphinx", "no sections", "shared line", "other sections", "named like a section"],
)
def test_docstrings_of_three_styles_are_read(docstring, parsed):
    assert parse_docstring(docstring) == parsed
