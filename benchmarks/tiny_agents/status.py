"""Explain status codes: an integer argument, an answer in words."""

from palestra import Agent, EvalSuite, function_tool, measure

SUBJECTS, STATES = "payment parcel invoice refund customs courier".split(), "pending refused received unclear".split()
MEANINGS = {
    104 + 37 * i: f"{subject} {state}" for i, (subject, state) in enumerate((s, t) for s in SUBJECTS for t in STATES)
}


@function_tool
def explain_status(status_code: int) -> str:
    """Explain a status code in words."""
    return MEANINGS[status_code]


@measure
def right_meaning(ctx):
    return ctx.expect in ctx.final_assistant_message.text


agent = Agent("support", "palestra/tiny", "Explain status codes to customers.", [explain_status])
cases = [
    {"input": form.format(code), "expect": meaning}
    for code, meaning in MEANINGS.items()
    for form in ("My order shows status {}. What is wrong?", "What is the meaning of status {}?", "Why do I see a {}?")
]
suite = EvalSuite.from_records(cases, measures=[right_meaning])
