"""What a training gives back: its model answers, with its tools."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from palestra import Agent, EvalSuite, function_tool, measure, train_grpo
from palestra.result import GRPOTrainingResult

PRICES = {"red lamp": 23, "blue mug": 45, "green chair": 67, "black desk": 89}


@function_tool
def price(item: str) -> int:
    """Look up the price of one item."""
    return PRICES[item]


@measure
def right_price(ctx: Any) -> bool:
    return str(ctx.expect) in ctx.final_assistant_message.text


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainingResult:
    """A training so short and slow that the model is still what it was."""
    cases = [{"input": f"What does a {item} cost?", "expect": cost} for item, cost in PRICES.items()]
    config = {
        "output_dir": str(tmp_path_factory.mktemp("runs")),
        "train.max_steps": 1,
        "train.problems_per_step": 1,
        "train.learning_rate": 1e-7,
        "rollout.group_size": 2,
        "rollout.max_new_tokens": 40,
    }
    agent = Agent("clerk", "palestra/tiny", "Use the tools to answer.", [price])
    return train_grpo(agent, EvalSuite.from_records(cases, measures=[right_price]), config=config)


def ask(result: GRPOTrainingResult, prompt: str, **options: Any) -> str:
    return result.generate(prompt, temperature=0, repetition_penalty=1.0, max_new_tokens=60, **options)


def test_generate_calls_the_agents_tools_and_gives_the_answer(result: GRPOTrainingResult) -> None:
    assert ask(result, "What does a blue mug cost?") == "That is 45."


def test_generate_takes_other_tools_and_instructions(result: GRPOTrainingResult) -> None:
    called = []

    def price(item: str) -> int:
        """Look up the price of one item."""
        called.append(item)
        return 71

    assert ask(result, "What does a blue mug cost?", tools=[price], instructions="Use the tools.") == "That is 71."
    assert called == ["blue mug"]


def test_generate_works_inside_a_running_event_loop(result: GRPOTrainingResult) -> None:
    async def notebook() -> str:
        return ask(result, "What does a red lamp cost?")

    assert asyncio.run(notebook()) == "That is 23."


def test_generate_is_repeatable_and_follows_the_seed(result: GRPOTrainingResult) -> None:
    answers = [result.generate("Hello there", temperature=2.0, max_new_tokens=12, seed=seed) for seed in (1, 1, 2)]
    assert answers[0] == answers[1] != answers[2]


def test_the_saved_model_is_the_trained_one(result: GRPOTrainingResult, tmp_path: Path) -> None:
    from palestra.models.loading import load_model

    saved = load_model(str(result.save_model(tmp_path / "model")), device="cpu")
    ours, theirs = result.model.state_dict(), saved.model.state_dict()
    assert all(bool((ours[name] == theirs[name]).all()) for name in ours)
    assert saved.tokenizer.chat_template == result.tokenizer.chat_template
