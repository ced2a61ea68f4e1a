"""Convert lengths with one tool: `palestra train examples/tiny_agents/unit_converter.py`."""

from palestra import Agent, EvalSuite, function_tool, measure


@function_tool
def feet_to_metres(feet: int) -> float:
    """Convert a length in feet to metres."""
    return round(feet * 0.3048, 1)


@measure
def right_length(ctx):
    return ctx.expect in ctx.final_assistant_message.text


agent = Agent("converter", model="palestra/tiny", instructions="You convert lengths.", tools=[feet_to_metres])
cases = [
    {"input": f"How many metres is a {what} of {feet} feet?", "expect": str(round(feet * 0.3048, 1))}
    for what in ("rope", "fence", "cable")
    for feet in range(14, 2000, 41)
]
suite = EvalSuite.from_records(cases, measures=[right_length])
config = {
    "train.max_steps": 24,
    "train.problems_per_step": 16,
    "rollout.group_size": 8,
    "rollout.max_new_tokens": 80,
}
