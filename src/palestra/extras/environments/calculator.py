"""Arithmetic with a calculator."""

from __future__ import annotations

import ast
import operator
import random
import re
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from pydantic import BaseModel, Field

from palestra.core.types import Message, Score, ToolCall
from palestra.envs.env import Env, EnvConfig
from palestra.evals.measures import fail_reason, pass_reason

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")
_LARGEST = 1e15
_EXAMPLES_SEED = 77_777_777


class CalculatorConfig(EnvConfig):
    """How hard the sums are."""

    operations: int = Field(2, ge=1, le=8, description="operations in one expression")
    largest: int = Field(99, ge=2, le=10**12, description="the largest number in an expression")
    shots: int = Field(0, ge=0, le=8, description="solved problems shown before each one, for models that need them")


class Calculator(Env):
    """Work out an expression with a calculator."""

    name = "calculator"
    works_in_forks = True
    instructions = "Work out the expression with the calculator, then answer with the result."
    env_config_cls: ClassVar[type[BaseModel]] = CalculatorConfig

    def setup(self) -> None:
        rng = random.Random(_EXAMPLES_SEED)
        self.shown = tuple(message for _ in range(self.config.shots) for message in _solved(self._expression(rng)))

    def make_problem(self, rng: random.Random) -> Any:
        expression = self._expression(rng)
        question = f"What is {expression}?"
        asked = (*self.shown, Message("user", question)) if self.shown else question
        return {"input": asked, "expect": evaluate(expression), "expression": expression}

    def _expression(self, rng: random.Random) -> str:
        expression = str(rng.randint(1, self.config.largest))
        for _ in range(self.config.operations):
            expression = f"({expression})" if rng.random() < 0.3 and " " in expression else expression
            expression += f" {rng.choice('+-*')} {rng.randint(1, self.config.largest)}"
        return expression

    def calculate(self, expression: str) -> float:
        """Work out an arithmetic expression.

        Args:
            expression: Numbers with + - * / and brackets, such as (3 + 4) * 5.
        """
        return evaluate(expression)

    def score(self, answer: str) -> Score:
        return is_number(answer, self.problem.expect)


def _solved(expression: str) -> Iterator[Message]:
    """A problem, the call that solves it, what the calculator says, and the answer."""
    call, result = ToolCall("call_0", "calculate", {"expression": expression}), str(evaluate(expression))
    yield Message("user", f"What is {expression}?")
    yield Message("assistant", "", (call,))
    yield Message("tool", result, tool_call_id=call.id, name=call.name)
    yield Message("assistant", result)


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


def is_number(answer: str, expected: float) -> Score:
    """Passed when the last number of the answer is the expected one.

    >>> is_number("It was 3, and is 1,204.50 now.", 1204.5).passed
    True
    """
    numbers = _NUMBER.findall(answer)
    if not numbers:
        return fail_reason("the answer names no number")
    number = float(numbers[-1].replace(",", ""))
    if abs(number - expected) > 1e-6 * max(1.0, abs(expected)):
        return fail_reason(f"the answer says {number:g}, expected {expected:g}")
    return pass_reason(f"the answer says {expected:g}")
