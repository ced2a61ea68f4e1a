"""An agent of one's own: train it with `palestra train examples/my_agent.py`, or run this file."""

from palestra import Agent, EvalSuite, fail_reason, function_tool, measure, pass_reason, train_grpo

COLOURS, THINGS = "red blue green black white pink".split(), "lamp mug chair pen book clock hat bag".split()
STOCK = {f"{colour} {thing}": 11 + 7 * i + 9 * k for i, colour in enumerate(COLOURS) for k, thing in enumerate(THINGS)}


@function_tool
def stock(item: str) -> int:
    """Look up the stock of an item."""
    return STOCK[item.removesuffix("s")]


@measure
def right_count(ctx):
    return str(ctx.expect) in ctx.final_assistant_message.text


@measure
def in_our_words(ctx):
    said = ctx.final_assistant_message.text
    return pass_reason("as we say it") if said.startswith("There are") else fail_reason(f"it said {said!r}")


agent = Agent("stock-clerk", model="palestra/tiny", instructions="Use the tools to answer.", tools=[stock])
cases = [{"input": f"How many {item}s are in stock?", "expect": count} for item, count in STOCK.items()]
suite = EvalSuite.from_records(cases, measures=[right_count, in_our_words])
config = {"train.learning_rate": 1e-3, "train.max_steps": 15, "rollout.group_size": 8, "rollout.max_new_tokens": 80}

if __name__ == "__main__":
    result = train_grpo(agent, suite, config=config)
    print(f"{result.before.pass_rate.rate:.0%} -> {result.after.pass_rate.rate:.0%} of the held-out cases pass")
    print(result.generate("How many green mugs are in stock?"))
