"""The shop that the example agents work in: a catalogue, three tools, and their descriptions."""

import json
from pathlib import Path

CATALOGUE = json.loads(Path(__file__).with_name("catalogue.json").read_text())
INSTRUCTIONS = "You work in a shop. Use the tools to answer."
MAX_ROUNDS = 6


def price(item: str) -> int:
    """Look up the price of one item.

    Args:
        item: The name of the item.
    """
    name = item.strip().lower().removesuffix("s")
    if name not in CATALOGUE:
        raise ValueError(f"no item {item!r}")
    return CATALOGUE[name]


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


FUNCTIONS = {"price": price, "multiply": multiply, "add": add}
_NUMBERS = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "description": "The first number."},
        "b": {"type": "integer", "description": "The second number."},
    },
    "required": ["a", "b"],
}
_ITEM = {
    "type": "object",
    "properties": {"item": {"type": "string", "description": "The name of the item."}},
    "required": ["item"],
}
SCHEMAS = {
    "price": ("Look up the price of one item.", _ITEM),
    "multiply": ("Multiply two numbers.", _NUMBERS),
    "add": ("Add two numbers.", _NUMBERS),
}


def call(name: str, arguments: dict | str) -> str:
    """The answer of a tool, as text; what goes wrong is told to the model."""
    try:
        values = json.loads(arguments) if isinstance(arguments, str) else arguments
        return str(FUNCTIONS[name](**values))
    except Exception as error:
        return f"Error: {type(error).__name__}: {error}"
