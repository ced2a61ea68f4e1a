"""Look up a portion, and multiply it."""

from palestra import Agent, EvalSuite, function_tool, measure

INGREDIENTS = "flour sugar butter rice pasta spinach lentils yoghurt honey cream cheese".split()
GRAMS = {ingredient: 15 + 16 * i for i, ingredient in enumerate(INGREDIENTS)}


@function_tool
def portion_grams(ingredient: str) -> int:
    """Look up how many grams of an ingredient one guest needs."""
    return GRAMS[ingredient]


@function_tool
def scale(grams: int, guests: int) -> int:
    """Scale a portion to the number of guests."""
    return grams * guests


@measure
def right_grams(ctx):
    return str(ctx.expect) in ctx.final_assistant_message.text.rstrip(".").split()


agent = Agent("cook", "palestra/tiny", "You are a cook. Use the tools to answer.", [portion_grams, scale])
cases = [
    {"input": f"How many grams of {ingredient} do I need for {guests} guests?", "expect": grams * guests}
    for ingredient, grams in GRAMS.items()
    for guests in range(2, 21)
]
suite = EvalSuite.from_records(cases, measures=[right_grams])
