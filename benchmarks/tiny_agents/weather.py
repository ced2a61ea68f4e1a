"""Two look-ups of two arguments, and the difference."""

from itertools import permutations

from palestra import Agent, EvalSuite, function_tool, measure

TOWNS, MONTHS = "Sevilla Tromso Bilbao Gdansk Zadar Tartu Cork Varna".split(), "January April July October".split()
CELSIUS = {(town, month): 5 + 7 * i % 29 + 2 * k for i, town in enumerate(TOWNS) for k, month in enumerate(MONTHS)}


@function_tool
def temperature(town: str, month: str) -> int:
    """Look up the mean temperature of a town in a month."""
    return CELSIUS[town, month]


@function_tool
def gap(warmer: int, colder: int) -> int:
    """The difference between two temperatures."""
    return warmer - colder


@measure
def right_gap(ctx):
    return str(ctx.expect) in ctx.final_assistant_message.text.rstrip(".").split()


agent = Agent("meteorologist", "palestra/tiny", "You know the climate. Use the tools.", [temperature, gap])
cases = [
    {"input": f"How much warmer is {a} than {b} in {m}?", "expect": CELSIUS[a, m] - CELSIUS[b, m]}
    for a, b in permutations(TOWNS, 2)
    for m in MONTHS
]
suite = EvalSuite.from_records([case for case in cases if case["expect"] > 0], measures=[right_gap])
