"""Long conversations: the model continues with a summary, or without its earlier reasoning; every turn trains once."""

import asyncio
from typing import Any

import pytest
from builders import END, BranchingPolicy, agent, samples_of, suite
from playing import attempt
from scripted import ANSWER, CALL, ScriptedPolicy, play

from palestra import Env, train_grpo
from palestra.core.config import RunConfig
from palestra.core.errors import SettingError
from palestra.core.types import Group, Message, Problem, Rollout
from palestra.envs.running import RunningEnv
from palestra.rollout.agent_loop import SUMMARY_OPENING, SUMMARY_REQUEST
from palestra.rollout.rewards import RewardFunctions
from palestra.train.batch import to_batch

SUMMARY = "I added 2 and 3, which is 5." + END
THOUGHT = "<think>\nLet me use the tool.\n</think>\n"


def trained_once(rollout: Rollout, policy: Any) -> bool:
    """Whether the batch trains the tokens that were sampled, each once, behind the tokens that it was sampled after."""
    batch = to_batch([Group("p", (rollout,))], [[1.0]], mask_truncated=False)
    rows = samples_of(batch)
    trained = sorted(int(i) for row in rows for i in row.token_ids[row.policy_mask])
    sampled = sorted(i for ids in policy.sampled for i in ids)
    whole = [row.token_ids.tolist() for row in rows]
    turns = zip(policy.prompts, policy.sampled, strict=True)
    return trained == sampled and all(any(row[: len(p) + len(s)] == p + s for row in whole) for p, s in turns)


@pytest.mark.parametrize("kind", [ScriptedPolicy, BranchingPolicy])
def test_a_long_conversation_continues_with_a_summary_that_the_model_writes(tiny_tokenizer, kind) -> None:
    rollout, policy = play(tiny_tokenizer, [CALL, SUMMARY, CALL, SUMMARY, ANSWER], kind=kind, compact_at=64)
    assert rollout.stop == "answered"
    assert rollout.passed
    assert len(rollout.lineages) == 2
    assert rollout.info == {"summaries": [1, 3]}
    assert trained_once(rollout, policy)
    asked = [m.text for m in rollout.messages if m.role == "user"]
    assert asked[1:] == [SUMMARY_REQUEST, SUMMARY_REQUEST]
    last = tiny_tokenizer.decode(policy.prompts[-1])
    assert f"{SUMMARY_OPENING}\nI added 2 and 3, which is 5." in last
    assert "tool_response" not in last, "the history is gone"
    assert last.count("What is 2 + 3?") == 1
    if kind is BranchingPolicy:
        assert policy.computed < sum(len(p) for p in policy.prompts), "the common beginning is computed once"


def test_a_short_conversation_stays_as_it_is(tiny_tokenizer) -> None:
    with_limit, _ = play(tiny_tokenizer, [CALL, ANSWER], compact_at=5000, keep_reasoning=False)
    without, _ = play(tiny_tokenizer, [CALL, ANSWER])
    assert with_limit.turns == without.turns
    assert with_limit.lineages == ()


def test_a_summary_that_is_cut_off_ends_the_attempt(tiny_tokenizer) -> None:
    rollout, _ = play(tiny_tokenizer, [CALL, SUMMARY.removesuffix(END)], compact_at=64)
    assert rollout.stop in ("truncated", "context_full")
    group = Group("p", (rollout,))
    assert not to_batch([group], [[1.0]], mask_truncated=True).policy_mask.any(), "none of its conversations trains"


def test_earlier_reasoning_is_left_out_and_each_turn_is_a_row(tiny_tokenizer) -> None:
    script = [THOUGHT + CALL, THOUGHT + CALL, THOUGHT + ANSWER]
    rollout, policy = play(tiny_tokenizer, script, kind=BranchingPolicy, keep_reasoning=False)
    assert rollout.stop == "answered"
    assert len(rollout.lineages) == 2
    assert trained_once(rollout, policy)
    assert "Let me use the tool" not in tiny_tokenizer.decode(policy.prompts[-1])
    assert tiny_tokenizer.decode(policy.prompts[-1]).count("tool_response>") >= 2
    kept, policy = play(tiny_tokenizer, script)
    assert kept.lineages == ()
    assert tiny_tokenizer.decode(policy.prompts[-1]).count("Let me use the tool") == 2


class Walk(Env):
    """Say a step, three times."""

    def problems(self, split):
        return ["Walk."]

    def start(self):
        self.steps = []

    def step(self, answer):
        self.steps.append(answer)
        return None if len(self.steps) == 3 else f"You went {answer}."

    def score(self, answer):
        return len(self.steps) == 3

    def score_turns(self):
        return [1.0, 2.0, 3.0]


def test_an_environments_last_words_are_repeated_and_it_scores_no_summaries(tiny_tokenizer) -> None:
    episode = RunningEnv(Walk()).open(Problem("p", "Walk."))
    script = [f"{word}{END}" for word in ("north", "noted", "east", "again", "south")]
    rollout, policy = play(tiny_tokenizer, script, episode, compact_at=16)
    assert "noted\n\nYou went north." in tiny_tokenizer.decode(policy.prompts[2])
    [scored] = asyncio.run(RewardFunctions().reward(Problem("p", "?"), [rollout], [episode], {})).rollouts
    assert scored.scores["turns"].turns == (1.0, 0.0, 2.0, 0.0, 3.0)
    assert scored.reward == 7.0


def test_endpoints_continue_with_a_summary_too() -> None:
    heard: list[list[Message]] = []

    def speak(messages):
        heard.append(list(messages))
        return "a summary" if SUMMARY_REQUEST in messages[-1].text else "north " * 50

    [group] = attempt(RunningEnv(Walk()), speak, compact_at=64)
    assert group.rollouts[0].passed
    assert any(SUMMARY_OPENING in m.text for m in heard[-1])
    assert len(heard[-1]) == 1


def test_settings_reach_the_loop_and_are_refused_where_they_have_no_effect(tmp_path) -> None:
    with pytest.raises(SettingError, match="echo"):
        RunConfig.build({"rollout.keep_reasoning": False, "echo.coefficient": 0.1})
    config = {
        "rollout.compact_at": 64, "rollout.max_new_tokens": 60, "train.max_steps": 1, "train.problems_per_step": 1,
        "rollout.group_size": 4, "train.mask_truncated": False, "output_dir": str(tmp_path),
    }  # fmt: skip
    cases = suite({"input": "What is 2 + 3?", "expect": "5"}, measures=[lambda ctx: len(ctx.messages) % 3 / 2])
    options: Any = {"held_out": 0.0, "config": config, "progress": False}
    result = train_grpo(agent(instructions="Add."), cases, **options)
    assert any("lineages" in rollout for rollout in result.run.rollouts())
    with pytest.raises(SettingError, match="compact_at"):
        train_grpo(agent(), cases, rollout_func=lambda prompts, trainer: {}, **options)
