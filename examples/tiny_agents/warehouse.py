"""Find goods in a warehouse with two arguments: `palestra train examples/tiny_agents/warehouse.py`."""

from palestra import Agent, EvalSuite, function_tool, measure

GOODS = "olive oil;basmati rice;tomato paste;oat flakes;sea salt;maple syrup;rye flour;green tea;black pepper;soy sauce"
AISLES = [f"{letter}-{number}" for letter in "BCKT" for number in (4, 12, 37)]
CRATES = {(g, a): 5 + 7 * i + 13 * k for i, g in enumerate(GOODS.split(";")) for k, a in enumerate(AISLES)}


@function_tool
def count_crates(goods: str, aisle: str) -> int:
    """Count the crates of some goods in an aisle."""
    return CRATES[goods, aisle]


@measure
def right_count(ctx):
    return ctx.expect in ctx.final_assistant_message.text.rstrip(".").split()


agent = Agent("keeper", model="palestra/tiny", instructions="You keep a warehouse.", tools=[count_crates])
cases = [
    {"input": f"How many crates of {goods} are stored in aisle {aisle}?", "expect": str(count)}
    for (goods, aisle), count in CRATES.items()
]
suite = EvalSuite.from_records(cases, measures=[right_count])
config = {
    "train.max_steps": 24,
    "train.problems_per_step": 16,
    "rollout.group_size": 8,
    "rollout.max_new_tokens": 120,
}
