"""Rollouts made by the user's own function, as TRL's rollout_func."""

from typing import Any

import pytest

from palestra import Agent, EvalSuite, train_grpo
from palestra.core.errors import PalestraError

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
    assert seen == [[0.0, 1.0], [2.0, 3.0]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logprobs": None}, "gave no logprobs"),
        ({"prompt_ids": [[1]]}, r"its columns have \{'prompt_ids': 1\}"),
        ({"logprobs": [[-1.0]] * 99}, "give one"),
    ],
)
def test_what_does_not_fit_is_told(tmp_path, change, words):
    def bad(prompts: list, trainer: Any) -> dict:
        output = {**speaks(prompts, trainer), **change}
        return {key: value for key, value in output.items() if value is not None}

    with pytest.raises(PalestraError, match=words):
        train(tmp_path, bad)
