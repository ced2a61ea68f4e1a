"""Rollouts made by the user's own function, as TRL's rollout_func."""

import asyncio
from typing import Any

import pytest
from scripted import ScriptedEnvironment, ScriptedPolicy

from palestra import Agent, EvalSuite, train_grpo
from palestra.core.errors import TrainingError
from palestra.core.types import Group, Problem
from palestra.models.chat.template import ChatFormat
from palestra.rollout.collect import Collector
from palestra.rollout.custom import FunctionRunner
from palestra.rollout.rewards import RewardFunctions

CONFIG = {
    "train.max_steps": 1, "train.problems_per_step": 2, "train.refill_limit": 0, "rollout.group_size": 2,
    "eval.cases": 1,
}  # fmt: skip
SUITE = EvalSuite.from_records(
    [{"input": f"Say {i}.", "expect": i} for i in range(5)],
    measures=[lambda ctx: "hello" in ctx.final_assistant_message.text],
)


def train(tmp_path: Any, function: Any, **more: Any) -> Any:
    agent = Agent("talker", "palestra/tiny", "Be short.")
    return train_grpo(agent, SUITE, config={**CONFIG, "output_dir": str(tmp_path)}, rollout_func=function, **more)


def speaks(prompts: list, trainer: Any) -> dict:
    """Every second completion says hello; its last token is the environment's."""
    encode = trainer.tokenizer.encode
    texts = ["hello there" if i % 2 else "no" for i in range(len(prompts))]
    completions = [encode(text, add_special_tokens=False) for text in texts]
    return {
        "prompt_ids": [encode(prompt[-1]["content"], add_special_tokens=False) for prompt in prompts],
        "completion_ids": completions,
        "logprobs": [[-1.0] * len(ids) for ids in completions],
        "env_mask": [[1] * (len(ids) - 1) + [0] for ids in completions],
        "wealth": [float(i) for i in range(len(prompts))],
    }


def test_what_the_function_gives_is_scored_and_trained(tmp_path):
    seen: list[Any] = []

    def reward(prompts: list, completions: list, wealth: list[float], **columns: Any) -> list[float]:
        seen.append(wealth)
        return [0.0] * len(prompts)

    result = train(tmp_path, speaks, extra_reward_funcs=[reward])
    assert result.metrics[0]["reward_mean"] == 0.5
    assert "loss" in result.metrics[0]
    assert seen == [[0.0], [0.0, 1.0], [2.0, 3.0], [0.0]], "also when held-out cases are scored"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logprobs": None}, "gave no logprobs"),
        ({"prompt_ids": [[1]]}, r"its columns have \{'prompt_ids': 1\}"),
        ({"logprobs": [[-1.0]] * 99}, "return one"),
    ],
)
def test_what_does_not_fit_is_told(tmp_path, change, words):
    def bad(prompts: list, trainer: Any) -> dict:
        output = {**speaks(prompts, trainer), **change}
        return {key: value for key, value in output.items() if value is not None}

    with pytest.raises(TrainingError, match=words):
        train(tmp_path, bad)


def collect(tokenizer: Any, environment: ScriptedEnvironment, function: Any, *rewards: Any) -> list[Group]:
    policy, chat = ScriptedPolicy(tokenizer, []), ChatFormat(tokenizer)
    collector = Collector(environment, FunctionRunner(function, None, chat, policy), RewardFunctions(rewards))
    return asyncio.run(collector.collect([Problem("p", "2 + 3?"), Problem("q", "1 + 4?")], 2, ["a", "b"]))


def fives(prompts: list, trainer: Any) -> dict:
    return {
        "prompt_ids": [[1, 2]] * len(prompts),
        "completion_ids": [[3, 4, 5]] * len(prompts),
        "logprobs": [[[-0.5, -9.0], [-0.25, -9.0], [0.0, -9.0]]] * len(prompts),
        "env_mask": [[1, 0, 1]] * len(prompts),
    }


def test_the_models_tokens_and_the_environments_are_told_apart(tiny_tokenizer):
    environment, seen = ScriptedEnvironment(), []

    def reward(environments: list, **columns: Any) -> list[float]:
        seen.extend(world.closed for world in environments)
        return [0.5] * len(environments)

    groups = collect(tiny_tokenizer, environment, fives, reward)
    assert seen == [0] * 4, "reward functions see environments that are still open"
    assert {r.reward for g in groups for r in g.rollouts} == {1.5}
    assert [g.problem_id for g in groups] == ["p", "q"]
    prompt, first, result, last = groups[1].rollouts[1].turns
    assert [t.maker for t in (prompt, first, result, last)] == ["template", "model", "environment", "model"]
    assert (first.token_ids.tolist(), result.token_ids.tolist(), last.token_ids.tolist()) == ([3], [4], [5])
    assert (first.logprobs.tolist(), last.logprobs.tolist()) == ([-0.5], [0.0]), "the best of several"
    assert last.versions.tolist() == [3]
    assert [episode.closed for episode in environment.episodes] == [1] * 4


def test_a_problem_that_does_not_open_leaves_the_others_of_the_call_alone(tiny_tokenizer):
    class OneIsBroken(ScriptedEnvironment):
        def open(self, problem: Problem) -> Any:
            if problem.id == "p":
                raise OSError("no room")
            return super().open(problem)

    bad, good = collect(tiny_tokenizer, OneIsBroken(), fives)
    assert {r.error for r in bad.rollouts} == {"opening an episode raised OSError: no room"}
    assert [r.error for r in good.rollouts] == [None, None]


def test_the_function_is_called_with_no_more_prompts_than_episodes_may_be_open(tiny_tokenizer):
    sizes: list[int] = []

    def counted(prompts: list, trainer: Any) -> dict:
        sizes.append(len(prompts))
        return fives(prompts, trainer)

    policy, chat = ScriptedPolicy(tiny_tokenizer, []), ChatFormat(tiny_tokenizer)
    collector = Collector(ScriptedEnvironment(), FunctionRunner(counted, None, chat, policy), max_open_episodes=5)
    problems = [Problem(str(i), "2 + 3?") for i in range(5)]
    groups = asyncio.run(collector.collect(problems, 2, list("abcde")))
    assert sizes == [4, 4, 2]
    assert [g.problem_id for g in groups] == ["0", "1", "2", "3", "4"]


def test_a_function_that_raises_fails_only_the_groups_that_it_raises_for(tiny_tokenizer):
    def refuses_one(prompts: list, trainer: Any) -> dict:
        if any("2 + 3" in prompt[-1]["content"] for prompt in prompts):
            raise ZeroDivisionError("division by zero")
        return fives(prompts, trainer)

    environment = ScriptedEnvironment()
    bad, good = collect(tiny_tokenizer, environment, refuses_one)
    assert {r.error for r in bad.rollouts} == {"rollout_func raised ZeroDivisionError: division by zero"}
    assert [r.error for r in good.rollouts] == [None, None]
    assert [episode.closed for episode in environment.episodes] == [1] * 4


def test_the_function_tells_which_answers_were_cut_off(tiny_tokenizer):
    def cut(prompts: list, trainer: Any) -> dict:
        return {**fives(prompts, trainer), "truncated": [False, True] * 2}

    groups = collect(tiny_tokenizer, ScriptedEnvironment(), cut)
    assert [r.stop for g in groups for r in g.rollouts] == ["answered", "truncated"] * 2
