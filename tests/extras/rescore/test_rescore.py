"""Changed measures over stored rollouts."""

from palestra.core.group_codec import rollout_to_dict
from palestra.core.types import Message, Problem, Rollout, Score, ToolCall, ToolResult
from palestra.evals.measures import as_measures, fail_reason, measure
from palestra.extras.rescore.command import rescore


def record(step: int, answer: str, passed: bool) -> dict:
    call = ToolCall("c", "price", {"item": "lamp"})
    messages = (
        Message("user", "What does a lamp cost?"),
        Message("assistant", "", (call,)),
        Message("tool", "51", tool_call_id="c", name="price"),
        Message("assistant", answer),
    )
    scores = {"right": Score(float(passed), passed, "then")}
    made = Rollout("p", (), messages, "answered", (ToolResult(call, "51"),), scores, reward=float(passed))
    return {"step": step, **rollout_to_dict(made)}


@measure("right")
def stricter(ctx):
    return ctx.final_assistant_message.text == f"{ctx.expect}"


@measure
def saw_the_tool(ctx):
    (result,) = ctx.tool_results
    return result.content == "51" and result.call.arguments == {"item": "lamp"} and ctx.case.id == "p"


@measure
def breaks(ctx):
    raise ValueError("no")


RECORDS = [record(1, "51", True), record(1, "about 51", True), record(2, "60", False)]
PROBLEMS = {"p": Problem("p", "", 51)}


def test_measures_see_what_was_said_and_expected_and_changes_are_counted() -> None:
    found = rescore(RECORDS, as_measures([stricter, saw_the_tool]), PROBLEMS)
    right, saw = found["measures"]
    assert right["old"]["pass_rate"] == 2 / 3
    assert right["new"]["pass_rate"] == 1 / 3
    assert right["changed"] == 1
    new = {"mean": 1.0, "pass_rate": 1.0, "errors": 0}
    assert saw == {"name": "saw_the_tool", "old": None, "new": new, "changed": 0}
    assert found["step"] == [1, 2]
    assert found["series"]["right"] == {"old": [1.0, 0.0], "new": [0.5, 0.0]}
    (change,) = found["changed"]
    assert (change["number"], change["old"]["reason"], change["new"]["passed"]) == (1, "then", False)


def test_measures_that_fail_and_unknown_problems_are_counted_and_the_limit_holds() -> None:
    found = rescore(RECORDS, as_measures([breaks]), PROBLEMS)
    assert found["measures"][0]["new"] == {"mean": None, "pass_rate": None, "errors": 3}
    found = rescore(RECORDS, as_measures([lambda ctx: fail_reason("always")]), {}, limit=2)
    assert (found["count"], found["without_problem"]) == (2, 2)
