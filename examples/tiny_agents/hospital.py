"""Look up with the result of a look-up: `palestra train examples/tiny_agents/hospital.py`."""

from palestra import Agent, EvalSuite, function_tool, measure

TITLES, SURNAMES = ("Mrs", "Mr", "Dr"), "Albright Bexley Corwin Dunmore Ellery Farrow Gresham Holloway Ibsen".split()
PATIENTS = [f"{title} {surname}" for title in TITLES for surname in SURNAMES]
ROOMS = {patient: f"{'EFGH'[i % 4]}{101 + 7 * i}" for i, patient in enumerate(PATIENTS)}
NURSES = "Beatrix Cosima Dorian Fabian Greta Henrik Imogen Jasper".split()
ON_DUTY = {room: NURSES[i * 5 % len(NURSES)] for i, room in enumerate(ROOMS.values())}


@function_tool
def patient_room(patient: str) -> str:
    """Look up the room of a patient."""
    return ROOMS[patient]


@function_tool
def duty_nurse(room: str) -> str:
    """Look up the nurse who is on duty in a room."""
    return ON_DUTY[room]


@measure
def right_nurse(ctx):
    return ctx.expect in ctx.final_assistant_message.text


agent = Agent("reception", "palestra/tiny", "You work in a hospital. Use the tools.", [patient_room, duty_nurse])
cases = [
    {"input": form.format(patient), "expect": ON_DUTY[room]}
    for patient, room in ROOMS.items()
    for form in ("Which nurse looks after {}?", "Who is the nurse of {} today?", "Please call the nurse for {}.")
]
suite = EvalSuite.from_records(cases, measures=[right_nurse])
config = {
    "train.max_steps": 30,
    "train.problems_per_step": 16,
    "rollout.group_size": 8,
    "rollout.max_new_tokens": 120,
}
