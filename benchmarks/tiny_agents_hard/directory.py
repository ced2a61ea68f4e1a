"""Two look-ups, the second with the result of the first: who leads a department, and what is their extension."""

from palestra import Agent, EvalSuite, function_tool, measure

DEPARTMENTS = "billing shipping legal security payroll design research travel press repairs archive canteen".split()
LEADERS = "Ortega Lindholm Baptiste Nakamura Oyelaran Kowalska Petrov Haugen Silva Moreau Costa Weber".split()
EXTENSIONS = {leader: 2000 + 137 * i % 1000 for i, leader in enumerate(LEADERS)}


@function_tool
def leader_of(department: str) -> str:
    """The name of the person who leads a department."""
    return LEADERS[DEPARTMENTS.index(department)]


@function_tool
def extension_of(name: str) -> int:
    """The telephone extension of a person."""
    return EXTENSIONS[name]


@measure
def right_extension(ctx):
    return str(ctx.expect) in ctx.final_assistant_message.text


QUESTIONS = (
    "What is the extension of whoever leads {department}?",
    "Which extension reaches the head of {department}?",
    "I need to call the leader of {department}. Which extension?",
    "Give me the extension of the person in charge of {department}.",
    "Extension of the {department} leader, please.",
)
agent = Agent(
    "directory",
    model="palestra/tiny",
    instructions="You answer questions about a company's directory.",
    tools=[leader_of, extension_of],
)
cases = [
    {"input": question.format(department=department), "expect": EXTENSIONS[leader]}
    for department, leader in zip(DEPARTMENTS, LEADERS, strict=True)
    for question in QUESTIONS
]
suite = EvalSuite.from_records(cases, measures=[right_extension])
