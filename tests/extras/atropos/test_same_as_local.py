"""Groups of our environments train the same and report the same, over the wire or in the trainer's own process."""

import json

from palestra.core.config import RunConfig
from palestra.core.types import Group, Lineage, Message, Rollout, Score, ToolCall, ToolResult, Turn
from palestra.extras.atropos.protocol import ModelLimits, ScoredGroup, read_group, write_group
from palestra.learner.local import LocalLearner
from palestra.models.loading import load_model
from palestra.train.batch import group_advantages, rollout_metrics, trainable_batch
from palestra.train.update import coefficients_at, update

NOW = 5
CONFIG = RunConfig.build({"rollout.temperature": 1.0, "train.learning_rate": 1e-3, "echo.coefficient": 0.5})


def rollout(reward: float, *calls: bool, **more) -> Rollout:
    """Some tool calls, True for each that goes well, and an answer; sampled by an earlier and the current policy."""
    turns, messages, results = [Turn("template", (1, 2, 3))], [Message("user", "1 + 1?")], []
    for i, ok in enumerate(calls):
        call = ToolCall(f"c{i}", "add", {"a": 1, "b": i})
        result = ToolResult(call, "2" if ok else "Error: no", ok, 0.25)
        turns += [Turn("model", (40 + i, 41), (-20.0, -1.25), NOW - 1), Turn("template", (19,))]
        turns += [Turn("environment", (20, 21 + i, 22)), Turn("template", (19, 18))]
        messages += [Message("assistant", "", (call,)), Message("tool", result.content, tool_call_id=call.id)]
        results.append(result)
    turns.append(Turn("model", (9, 10 + int(4 * reward)), (-0.75, -0.001), (NOW - 1, NOW)))
    messages.append(Message("assistant", "It is 2."))
    scores = {"right": Score(reward, reward >= 1), "short": Score(1.0, True, error=reward == 0.25)}
    whole = {"stop": "answered", "tool_results": tuple(results), "scores": scores, "reward": reward, "seconds": 0.5}
    return Rollout("p", tuple(turns), tuple(messages), **(whole | more))


HELPER = Lineage(
    (Turn("template", (4, 5)), Turn("model", (6, 7), (-0.5, -1.0), NOW)), (Message("user", "?"),), "answered"
)
WITNESS = {"right": Score(1.0, True), "undecided": Score(0.5, None), "witness": Score(0.0, False, counts=False)}
GROUPS = [
    Group(
        "a",
        (
            rollout(1.0, True, lineages=(HELPER,), info={"exit_code": 0}, scores=WITNESS),
            rollout(0.25, True, False),
            rollout(0.0, stop="truncated"),
        ),
        {"agent/rows_per_attempt": 4 / 3},
    ),
    Group("b", (rollout(0.5, False, stop="tool_limit"), rollout(1.0), rollout(0.0, stop="failed", error="broken"))),
]


def over_the_wire(group: Group) -> Group:
    """As `env serve` posts it, the API stores it and the trainer reads it."""
    body = json.dumps(write_group(group, 0, mask_truncated=True))
    stored = ScoredGroup.model_validate_json(body).model_dump_json()
    limits = ModelLimits(vocabulary=1024, context_tokens=512)
    return read_group(json.loads(stored), group.problem_id, limits, policy_version=NOW - 3)


def step(groups: list[Group]) -> tuple[dict[str, float], dict[str, float]]:
    """The metrics of the rollouts, and of one update of the embedded model."""
    advantages = group_advantages(groups, CONFIG.train, {})
    batch = trainable_batch(groups, advantages, CONFIG.train)
    learner = LocalLearner(load_model("palestra/tiny").model, config=CONFIG)
    learned = update(learner, batch, CONFIG, coefficients_at(0, CONFIG, None, 0.0), NOW)
    return rollout_metrics(groups, advantages, NOW), learned


def test_groups_over_the_wire_report_and_train_the_same():
    metrics, learned = step([over_the_wire(group) for group in GROUPS])
    local_metrics, locally_learned = step(GROUPS)
    assert metrics == local_metrics
    assert metrics["tool_calls_mean"] == 4 / 5
    assert metrics["tool_error_rate"] == 2 / 4
    assert metrics["truncation_rate"] == 1 / 5
    assert metrics["rollout_failures"] == 1
    assert metrics["measure_errors"] == 1
    assert metrics["staleness_max"] == 1
    assert metrics["pass_rate/right"] == 2 / 5
    assert learned["echo_loss"] > 0, "tool results are learned"
    assert learned["ratio_max"] > 1.0, "tokens of the earlier version have the sampler's logprobs"
    for timed in ("train_seconds", "train_tokens_per_s"):
        del learned[timed], locally_learned[timed]
    assert learned == locally_learned


def test_columns_of_the_protocol_alone_have_no_tools_and_no_echo():
    """The control: without our own columns nobody can know."""
    bare = [{k: write_group(g, 0, mask_truncated=True)[k] for k in ("tokens", "masks", "scores")} for g in GROUPS]
    limits = ModelLimits(vocabulary=1024, context_tokens=512)
    metrics, learned = step([read_group(columns, "p", limits, NOW - 1) for columns in bare])
    assert metrics["tool_calls_mean"] == metrics["truncation_rate"] == 0
    assert "echo_loss" not in learned
