"""An agent of one's own: train it with `palestra train examples/my_agent.py`, or run this file."""

from palestra import Agent, EvalSuite, fail_reason, function_tool, measure, pass_reason, train_grpo

COLOURS, THINGS = "red blue green black white pink".split(), "lamp mug chair pen book clock hat bag".split()
STOCK = {f"{colour} {thing}": 11 + 7 * i + 9 * k for i, colour in enumerate(COLOURS) for k, thing in enumerate(THINGS)}


@function_tool
def stock(item: str) -> int:
    """Look up the stock of an item."""
    return STOCK[item.removesuffix("s")]


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@measure
def right_count(ctx):
    said = ctx.final_assistant_message.text
    return pass_reason("right") if f" {ctx.expect}." in said else fail_reason(f"not {ctx.expect}: {said}")


agent = Agent("stock-clerk", model="palestra/tiny", instructions="Use the tools to answer.", tools=[stock, add])
pairs = [(a, b) for a in STOCK for b in STOCK if a < b][::8]
cases = [{"input": f"How many {a}s and {b}s are in stock?", "expect": STOCK[a] + STOCK[b]} for a, b in pairs]
suite = EvalSuite.from_records(cases, measures=[right_count])
config = {"train.max_steps": 15, "train.problems_per_step": 4, "rollout.group_size": 8, "rollout.max_new_tokens": 80}

if __name__ == "__main__":
    result = train_grpo(agent, suite, config=config)
    print(f"{result.before.pass_rate.rate:.0%} -> {result.after.pass_rate.rate:.0%} of the held-out cases pass")
    print(result.generate("How many green mugs and red lamps are in stock?"))
