"""Add up two legs of a journey: `palestra train examples/tiny_agents/timetable.py`."""

from itertools import permutations

from palestra import Agent, EvalSuite, function_tool, measure

STATIONS = "Ashford Colby Denham Harlow Kirkwall Morpeth Ripley Selby".split()
MINUTES = {pair: 8 + (17 * i) % 83 for i, pair in enumerate(permutations(STATIONS, 2))}


@function_tool
def ride_minutes(origin: str, destination: str) -> int:
    """Look up how many minutes a ride takes."""
    return MINUTES[origin, destination]


@function_tool
def combine_rides(ride1: int, ride2: int) -> int:
    """Add the minutes of two rides."""
    return ride1 + ride2


@measure
def right_time(ctx):
    return str(ctx.expect) in ctx.final_assistant_message.text.rstrip(".").split()


agent = Agent("rail-desk", "palestra/tiny", "You plan rides. Use the tools.", [ride_minutes, combine_rides])
cases = [
    {"input": f"How long is the ride from {a} to {b} and on to {c}?", "expect": MINUTES[a, b] + MINUTES[b, c]}
    for a, b, c in permutations(STATIONS, 3)
]
suite = EvalSuite.from_records(cases, measures=[right_time])
config = {
    "train.max_steps": 30,
    "train.problems_per_step": 16,
    "rollout.group_size": 8,
    "rollout.max_new_tokens": 160,
    "eval.cases": 80,
}
