"""The demo with witnesses: the right total is rewarded, what is measured besides counts nothing."""

from palestra import demo, measure

agent, suite, held_out, config = demo.agent, demo.suite, demo.held_out, demo.config


@measure
def looked_up(ctx):
    """A tool was called before the answer."""
    return any(call.name == "price" for call in ctx.tool_calls)


@measure
def exact_number(ctx):
    """The answer ends with the expected number, and has no other."""
    digits = [word.strip(".") for word in ctx.final_assistant_message.text.split() if word.strip(".").isdigit()]
    return digits == [str(ctx.expect)]


measures = [demo.right_total, looked_up, exact_number]
reward_weights = {"right_total": 1.0, "looked_up": 0.0, "exact_number": 0.0}
