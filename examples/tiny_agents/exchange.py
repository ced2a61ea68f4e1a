"""Look up an exchange rate and calculate with it: `palestra train examples/tiny_agents/exchange.py`."""

import re
from typing import Literal

from palestra import Agent, EvalSuite, function_tool, measure

RATES = {"zloty": 4.25, "krona": 11.5, "forint": 405, "dinar": 117, "rupee": 96.5, "peso": 20.5, "rand": 20, "yen": 162}


@function_tool
def exchange_rate(currency: str) -> float:
    """Look up what one euro is in another currency."""
    return RATES[currency]


@function_tool
def calculate(quantity: float, operator: Literal["+", "-", "*", "/"], factor: float) -> float:
    """Calculate with two numbers."""
    match operator:
        case "+":
            return quantity + factor
        case "-":
            return quantity - factor
        case "*":
            return quantity * factor
    return round(quantity / factor, 2)


@measure
def right_amount(ctx):
    numbers = re.findall(r"\d+(?:\.\d+)?", ctx.final_assistant_message.text)
    return bool(numbers) and float(numbers[-1]) == ctx.expect


agent = Agent("teller", model="palestra/tiny", instructions="Change money.", tools=[exchange_rate, calculate])
cases = [
    {"input": f"How much is {euros} euros in {currency}?", "expect": euros * rate}
    for currency, rate in RATES.items()
    for euros in range(2, 60, 3)
]
suite = EvalSuite.from_records(cases, measures=[right_amount])
config = {
    "train.max_steps": 30,
    "train.problems_per_step": 16,
    "rollout.group_size": 8,
    "rollout.max_new_tokens": 120,
}
