"""Two look-ups with different tools, and a third tool for both results."""

from palestra import Agent, EvalSuite, function_tool, measure

STOPS = (
    "Hexham Alnwick Keswick Buxton Ludlow Whitby Tenby Dawlish Settle Malvern Wells Frome Bude Rye Oban Troon".split()
)
DAYS = ("Monday", "Friday", "Sunday")
BUS = {stop: 6 + 11 * i % 43 for i, stop in enumerate(STOPS)}
RAIL = {stop: 8 + 17 * i % 47 for i, stop in enumerate(STOPS)}


@function_tool
def bus_fare(stop: str) -> int:
    """Look up the fare of the bus to a stop."""
    return BUS[stop]


@function_tool
def rail_fare(stop: str) -> int:
    """Look up the fare of the train to a stop."""
    return RAIL[stop]


@function_tool
def return_trip(outward: int, homeward: int) -> int:
    """The fare of a trip there and back."""
    return outward + homeward


@measure
def right_fare(ctx):
    return str(ctx.expect) in ctx.final_assistant_message.text.rstrip(".").split()


agent = Agent("tickets", "palestra/tiny", "Sell tickets. Use the tools.", [bus_fare, rail_fare, return_trip])
cases = [
    {"input": f"On {day} I take the bus to {stop} and the train back. What do I pay?", "expect": BUS[stop] + RAIL[stop]}
    for stop in STOPS
    for day in DAYS
]
suite = EvalSuite.from_records(cases, measures=[right_fare])
