from dataclasses import replace

import numpy as np
from builders import samples_of

from palestra.core.config_sections import TrainSection
from palestra.core.types import Group, Lineage, Rollout, Score, ToolCall, ToolResult, Turn
from palestra.train.batch import group_advantages, has_signal, rollout_metrics, to_batch, trainable_batch

TURNS = (
    Turn("template", (1, 2, 3)),
    Turn("model", (4, 5), logprobs=(-0.5, -0.25), versions=7),
    Turn("template", (6,)),
    Turn("environment", (7, 8)),
    Turn("template", (9,)),
    Turn("model", (10,), logprobs=(-1.0,), versions=8),
)


def rollout(reward: float, **changes: object) -> Rollout:
    base = Rollout("p", TURNS, (), "answered", scores={"right": Score(reward, reward == 1.0)}, reward=reward)
    return replace(base, **changes)  # type: ignore[arg-type]


def test_a_sample_holds_the_very_tokens_of_its_rollout_of_which_those_of_the_model_are_trained() -> None:
    groups = [Group("p", (rollout(1.0),))] * 4
    trained = [False, False, False, True]
    (sample,) = samples_of(to_batch(groups, [[0.5]] * 4, mask_truncated=True, trained=trained))
    assert sample.token_ids.tolist() == list(range(1, 11))
    assert (sample.prompt_length, sample.group) == (3, 3)
    assert sample.versions.tolist() == [0, 0, 0, 7, 7, 0, 0, 0, 0, 8]
    assert sample.token_ids[sample.policy_mask].tolist() == [4, 5, 10]
    assert sample.token_ids[sample.echo_mask].tolist() == [7, 8]
    assert sample.logprobs[sample.policy_mask].tolist() == [-0.5, -0.25, -1.0]


def test_a_truncated_rollout_stays_in_the_baseline_but_trains_nothing() -> None:
    group = Group("p", (rollout(1.0), rollout(0.0, stop="truncated")))
    advantages = group_advantages([group], TrainSection(), {"right": 1.0})
    assert advantages[0][0] > 0 > advantages[0][1]
    first, second = samples_of(to_batch([group], advantages, mask_truncated=True))
    assert any(first.policy_mask)
    assert not any(second.policy_mask)
    assert not any(second.echo_mask)
    assert any(samples_of(to_batch([group], advantages, mask_truncated=False))[1].policy_mask)


def test_a_failed_rollout_is_in_no_baseline_and_no_batch() -> None:
    group = Group("p", (rollout(1.0), rollout(0.0), rollout(0.0, error="tool server gone", stop="failed")))
    advantages = group_advantages([group], TrainSection(advantage_scale="none"), {"right": 1.0})
    assert advantages == [[0.5, -0.5, 0.0]]
    assert to_batch([group], advantages, mask_truncated=True).rows == 2


def test_equal_rewards_train_no_policy_but_echo_learns_their_tool_results() -> None:
    groups = [Group("equal", (rollout(1.0), rollout(1.0))), Group("mixed", (rollout(1.0), rollout(0.0)))]
    advantages = group_advantages(groups, TrainSection(), {})
    assert trainable_batch(groups, advantages, TrainSection()).groups.tolist() == [1, 1]
    both = samples_of(trainable_batch(groups, advantages, TrainSection(), echo=True))
    rows = [(s.group, bool(s.policy_mask.any()), int(s.echo_mask.sum())) for s in both]
    assert rows == [(0, False, 2), (0, False, 2), (1, True, 2), (1, True, 2)]


def signal(*rollouts: Rollout, **train: object) -> bool:
    group = Group("p", rollouts)
    return has_signal(group, group_advantages([group], TrainSection(**train), {"a": 1.0, "b": 0.5})[0])  # type: ignore[arg-type]


def both(a: float, b: float) -> Rollout:
    return rollout(a + b, scores={"a": Score(a, False), "b": Score(b, False)})


def test_equal_rewards_carry_no_signal_unless_measures_differ_and_are_normalised_first() -> None:
    assert not signal(rollout(1.0), rollout(1.0))
    assert not signal(rollout(0.1 + 0.2), rollout(0.3))
    assert not signal(rollout(1.0), rollout(0.0, error="measure judge took longer than 60 s"))
    assert signal(rollout(1.0), rollout(0.0))
    siblings = [replace(both(a, b), reward=0.5) for a, b in ((0.5, 0.0), (0.0, 1.0))]
    assert not signal(*siblings)
    assert signal(*siblings, combine="normalise_then_sum")


def test_reward_functions_count_where_measures_are_normalised_before_they_are_added() -> None:
    """They are scores beside the measures; one that has no say about a rollout does not pull it down."""

    def scored(right: float, brief: float | None) -> Rollout:
        scores = {"right": Score(right, right == 1.0)} | ({} if brief is None else {"brief": Score(brief, None)})
        return rollout(right + (brief or 0.0), scores=scores)

    group = Group("p", (scored(1.0, 0.0), scored(1.0, 0.5), scored(1.0, None)))
    advantages = group_advantages([group], TrainSection(combine="normalise_then_sum"), {"right": 1.0})[0]
    assert advantages[0] < 0 < advantages[1]
    assert advantages[2] == 0.0


def test_scores_and_logged_numbers_are_in_the_metrics_of_the_step() -> None:
    scores = {"right": Score(1.0, True), "brief": Score(0.5, None)}
    groups = [Group("p", (rollout(1.5, scores=scores), rollout(0.0)), {"words": 4.0}), Group("q", (), {"words": 2.0})]
    metrics = rollout_metrics(groups, [[0.0, 0.0], []], 0)
    assert metrics["score/brief"] == 0.5
    assert "pass_rate/brief" not in metrics
    assert (metrics["score/right"], metrics["pass_rate/right"], metrics["words"]) == (0.5, 0.5, 3.0)
    graded = rollout(0.5, scores={"brief": Score(0.5, None)})
    assert "pass_rate" not in rollout_metrics([Group("p", (graded, graded))], [[0.0, 0.0]], 0), "there is no verdict"
    assert rollout_metrics([Group("p", (graded, rollout(1.0)))], [[0.0, 0.0]], 0)["pass_rate"] == 1.0


def test_metrics_of_advantages_are_of_those_that_came_along() -> None:
    posted = np.array([0, 0, 0, 2, 4, 0, 0, 0, 0, -3], np.float32)  # the mean of the model's three tokens is 1
    group = Group("p", (rollout(1.0, advantages=posted), rollout(0.0)))
    metrics = rollout_metrics([group], [[0.5, -0.5]], policy_version=8)
    assert (metrics["advantage_max"], metrics["advantage_min"]) == (1.0, -0.5)


def test_each_conversation_of_an_attempt_is_a_row_with_its_advantage_and_the_attempt_counts_once() -> None:
    helper = Lineage((Turn("template", (20, 21)), Turn("model", (22,), logprobs=(-0.1,), versions=8)), (), "answered")
    cut = replace(helper, stop="truncated")
    group = Group("p", (rollout(1.0, lineages=(helper, cut)), rollout(0.0)))
    advantages = group_advantages([group], TrainSection(advantage_scale="none"), {"right": 1.0})
    assert advantages == [[0.5, -0.5]]
    rows = samples_of(to_batch([group], advantages, mask_truncated=True))
    assert [row.token_ids.tolist()[0] for row in rows] == [1, 20, 20, 1]
    assert [float(row.advantages[0]) for row in rows] == [0.5, 0.5, 0.5, -0.5]
    assert [bool(row.policy_mask.any()) for row in rows] == [True, True, False, True]
    assert group.rollouts[0].sampled_tokens == 5
    assert rollout_metrics([group], advantages, 8)["rollouts"] == 2


def test_a_step_counts_rollouts_that_were_reinforced_without_a_successful_tool_call() -> None:
    good, failed = (ToolResult(ToolCall("c", "add"), "", ok) for ok in (True, False))
    calls = ((good,), (failed,), (), (failed,))
    rollouts = tuple(rollout(0.0, tool_names=("add",), tool_results=results) for results in calls)
    metrics = rollout_metrics([Group("p", rollouts)], [[1.0, 0.5, 0.5, -2.0]], 0)
    assert (metrics["reinforced_rollouts"], metrics["reinforced_without_tools"]) == (3.0, 2.0)
    without_tools = rollout_metrics([Group("p", (rollout(0.0), rollout(1.0)))], [[-1.0, 1.0]], 0)
    assert "reinforced_rollouts" not in without_tools


def test_a_step_counts_groups_that_all_passed_and_that_all_failed() -> None:
    yes, no, graded = rollout(1.0), rollout(0.0), rollout(1.0, scores={"close": Score(0.5, None)})
    groups = [Group("a", (yes, yes)), Group("b", (no, no)), Group("c", (yes, no)), Group("d", (no, no))]
    metrics = rollout_metrics(groups, [[0.0, 0.0], [0.0, 0.0], [1.0, -1.0], [0.0, 0.0]], 0)
    assert (metrics["passed_groups"], metrics["failed_groups"]) == (0.25, 0.5)
    assert "passed_groups" not in rollout_metrics([Group("p", (graded, graded))], [[0.0, 0.0]], 0)
