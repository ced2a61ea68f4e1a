"""Arithmetic with a calculator."""

from __future__ import annotations

import ast
import operator
import random
from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import BaseModel, Field

from palestra.core.types import Score
from palestra.envs.env import Env, EnvConfig
from palestra.envs.library._numbers import is_number

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_LARGEST = 1e15


class CalculatorConfig(EnvConfig):
    """How hard the sums are."""

    operations: int = Field(2, ge=1, le=8, description="operations in one expression")
    largest: int = Field(99, ge=2, description="the largest number in an expression")


class Calculator(Env):
    """Work out an expression with a calculator."""

    name = "calculator"
    instructions = "Work out the expression with the calculator, then answer with the result."
    env_config_cls: ClassVar[type[BaseModel]] = CalculatorConfig

    def make_problem(self, rng: random.Random) -> Any:
        expression = str(rng.randint(1, self.config.largest))
        for _ in range(self.config.operations):
            expression = f"({expression})" if rng.random() < 0.3 and " " in expression else expression
            expression += f" {rng.choice('+-*')} {rng.randint(1, self.config.largest)}"
        return {"input": f"What is {expression}?", "expect": evaluate(expression), "expression": expression}

    def calculate(self, expression: str) -> float:
        """Work out an arithmetic expression.

        Args:
            expression: Numbers with + - * / and brackets, such as (3 + 4) * 5.
        """
        return evaluate(expression)

    def score(self, answer: str) -> Score:
        return is_number(answer, self.problem.expect)


def evaluate(expression: str) -> float:
    """The value of an expression of numbers, + - * / and brackets; anything else is a ValueError."""
    try:
        value = _value(ast.parse(expression, mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is not an arithmetic expression") from None
    return int(value) if float(value).is_integer() else value


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            result: float = number
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            result = _OPERATORS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(ast.USub(), operand):
            result = -_value(operand)
        case _:
            raise ValueError("only numbers, + - * / and brackets are known here")
    if abs(result) > _LARGEST:
        raise ValueError(f"numbers above {_LARGEST:g} are too large")
    return result
