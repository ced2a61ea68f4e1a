"""The lesson in examples/minimal_grpo.py: it is short, stands alone, and its reward rises."""

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from palestra.algo.advantage import advantages
from palestra.algo.losses import Objective, token_weights
from palestra.algo.losses import policy_loss as token_policy_loss


def policy_loss(objective, logprobs, old, row, advantages, **more):
    """With one advantage a row."""
    return token_policy_loss(objective, logprobs, old, row, advantages[row], rows=len(advantages), **more)


LESSON = Path(__file__).parents[2] / "examples/minimal_grpo.py"


@pytest.fixture(scope="module")
def lesson() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minimal_grpo", LESSON)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_lesson_is_under_150_lines_and_needs_only_torch_and_transformers() -> None:
    text = LESSON.read_text()
    assert len(text.splitlines()) < 150
    imports = [n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.Import, ast.ImportFrom))]
    names = {getattr(n, "module", None) or n.names[0].name for n in imports}
    assert names == {"__future__", "argparse", "json", "random", "importlib.resources", "torch", "transformers"}


def test_reward_is_given_for_exactly_the_right_call(lesson: ModuleType) -> None:
    right = '<tool_call>\n{"name": "price", "arguments": {"item": "red mug"}}\n</tool_call>'
    assert lesson.reward(right, "red mug") == 1.0
    for wrong in (right + " It costs 3.", right + right, right.replace("price", "add"), "It costs 3.", right[:-3], ""):
        assert lesson.reward(wrong, "red mug") == 0.0
    assert lesson.reward(right, "blue mug") == 0.0
    assert lesson.reward("<tool_call>[1</tool_call>", "red mug") == 0.0


def test_lesson_teaches_the_trainers_own_formulas(lesson: ModuleType) -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    advantage = lesson.advantages(rewards).view(-1, 1)
    torch.testing.assert_close(advantage.flatten().double(), advantages(rewards.flatten(), [0, 0, 0, 1, 1, 1]))

    mask = (torch.arange(5) < torch.tensor([5, 2, 3, 1, 4, 5])[:, None]).long()
    old = -torch.rand(6, 5)
    new = old + 0.4 * torch.randn(6, 5)
    row = mask.nonzero()[:, 0]
    per_token, _ = policy_loss(Objective(loss="dapo"), new[mask.bool()], old[mask.bool()], row, advantage.flatten())
    totals = {"rows_total": 6, "tokens_total": len(row), "max_completion_length": 5}
    ours = (per_token * token_weights("dapo", row, mask.sum(1), **totals)).sum()
    torch.testing.assert_close(lesson.grpo_loss(new, old, advantage, mask).double(), ours)


@pytest.mark.slow
def test_reward_rises_within_ten_steps(lesson: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = lesson.main(steps=10, seed=0)
    rewards = [float(r) for r in re.findall(r"reward (\d\.\d+)", capsys.readouterr().out)]
    assert len(rewards) == 10
    assert min(rewards[-3:]) > rewards[0] + 0.15
    assert after > before + 0.25
    assert after >= 0.85
