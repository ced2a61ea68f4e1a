"""A user's loss and advantages: equal to the built-in ones to the bit, from every entry point."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import TINY, add
from small_learner import build, make_samples, settings

from palestra import Agent, EvalSuite, measure, train_grpo
from palestra.algo.batch import Batch
from palestra.algo.losses import Objective, PolicyTokens
from palestra.algo.step_loss import StepLoss
from palestra.cli.main import run
from palestra.core.errors import SettingError, UserCodeError
from palestra.core.run_folder import Resume, RunFolder
from palestra.learner.local import LocalLearner
from palestra.train.update import Coefficients, update

DAPO = """
import torch

def dapo(tokens):
    clipped = tokens.ratio.clamp(1.0 - tokens.objective.epsilon, tokens.objective.upper)
    return -torch.minimum(tokens.ratio * tokens.advantages, clipped * tokens.advantages)

def normalised(batch):
    return batch.advantages
"""


functions: dict[str, Any] = {}
exec(DAPO, functions)
dapo, normalised = functions["dapo"], functions["normalised"]


def cispo(tokens: PolicyTokens) -> torch.Tensor:
    return -tokens.ratio.clamp(max=tokens.objective.upper).detach() * tokens.advantages * tokens.logprobs


@pytest.mark.parametrize(("name", "function"), [("dapo", dapo), ("grpo", dapo), ("cispo", cispo)])
@pytest.mark.parametrize("more", [{}, {"beta": 0.1, "importance_correction": "token_truncate", "minibatches": 2}])
def test_a_loss_that_equals_a_built_in_one_gives_the_same_weights_to_the_bit(name, function, more) -> None:
    weights, metrics = [], []
    for custom in (None, function):
        config = settings(train={"loss": name, **more})
        learner = LocalLearner(build(), config=config)
        rates = Coefficients(learning_rate=1e-2, entropy=0.0, echo=0.0)
        batch = Batch.of(make_samples(version=1))
        metrics.append(update(learner, batch, config, rates, version=2, custom_loss=custom))
        weights.append([p.detach().clone() for p in learner.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert not torch.equal(weights[0][0], next(build().parameters()))
    assert metrics[0]["loss"] == metrics[1]["loss"]
    assert "clip_fraction_high" in metrics[0].keys() - metrics[1].keys()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda tokens: tokens.logprobs.sum(), r"shape \[\]"),
        (lambda tokens: 1.0, r"gave 1\.0"),
        (lambda tokens: tokens.logprobs / 0, "inf for token 0"),
        (lambda tokens: tokens.advantages, "no gradient"),
        (lambda tokens: tokens.nonsense, "AttributeError"),
    ],
)
def test_what_is_no_loss_is_refused_and_the_weights_stay(function, words) -> None:
    learner, samples = LocalLearner(build(), config=settings()), make_samples()
    loss = StepLoss.of(Batch.of(samples), Objective(custom=function), max_completion_length=16)
    with pytest.raises(UserCodeError, match=words):
        learner.forward_backward(Batch.of(samples), loss)
    assert not learner.has_pending
    assert all(torch.equal(a, b) for a, b in zip(learner.model.parameters(), build().parameters(), strict=True))


@measure
def digits(ctx):
    return min(1.0, sum(c.isdigit() for c in ctx.final_assistant_message.text) / 8)


def trained(folder: Path, config: dict[str, Any] | None = None, **more: Any) -> tuple[list[dict[str, float]], Any]:
    agent = Agent("adder", TINY, "Add.", [add])
    suite = EvalSuite.from_records([{"input": f"What is {i} + 2?"} for i in range(4)], measures=[digits])
    base = {"seed": 3, "train.max_steps": 2, "train.problems_per_step": 2, "train.mask_truncated": False}
    base |= {"rollout.group_size": 4, "rollout.max_new_tokens": 12, "checkpoint.every": 1, "eval.cases": 1}
    options = {"config": base | (config or {}), "held_out": 0.25, "progress": False, "folder": folder}
    result = train_grpo(agent, suite, **options | more)
    return result.run.metrics(), result


def numbers(rows: list[dict[str, float]]) -> list[tuple[float, float, float]]:
    return [(row["loss"], row["grad_norm"], row["reward_mean"]) for row in rows]


def test_train_grpo_takes_functions_and_the_command_line_a_file(tmp_path: Path, monkeypatch: Any) -> None:
    plain, _ = trained(tmp_path / "plain")
    custom, result = trained(tmp_path / "custom", advantages=normalised, loss=dapo)
    assert numbers(plain) == numbers(custom)
    assert result.run.record["objective"] == {"advantages": "normalised", "loss": "dapo"}

    file = tmp_path / "mine.py"
    file.write_text(DAPO)
    monkeypatch.chdir(tmp_path)
    named = {"train.custom_loss": "mine.py:dapo", "train.custom_advantages": "mine.py:normalised"}
    by_file, result = trained(tmp_path / "file", named)
    assert numbers(plain) == numbers(by_file)

    monkeypatch.chdir(file.parent.parent)  # a resumed run finds the file from anywhere
    more, _ = trained(tmp_path / "file", resume=Resume(result.run.path, max_steps=3))
    assert len(more) == 3
    with pytest.raises(SettingError, match=r"loss=dapo"):
        trained(tmp_path / "custom", resume=tmp_path / "custom")


def test_token_advantages_of_a_function_are_in_the_token_file(tmp_path: Path) -> None:
    def rising(batch: Batch) -> np.ndarray:
        return np.arange(len(batch.token_ids)) / 100.0

    rows, result = trained(tmp_path / "run", {"track.tokens_every": 1, "train.max_steps": 1}, advantages=rising)
    [file] = (result.run.path / "tokens").glob("*.npy")
    advantages = np.load(file)["advantage"]
    trained_on = advantages[np.load(file)["policy_mask"]]
    assert len(np.unique(trained_on)) == len(trained_on) > 10
    assert json.loads(json.dumps(rows[0]))["loss"] != 0.0


def test_the_command_line_takes_a_file_for_environments_too(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(DAPO)
    small = "--rollout.group_size 2 --train.problems_per_step 1 --train.max_steps 1 --eval.cases 1".split()
    words = ["train", "--env", "calculator", "--folder", "run", *small, "--rollout.max_new_tokens", "8"]
    assert run([*words, "--train.custom_loss", "mine.py:dapo"]) == 0
    assert RunFolder(tmp_path / "run").record["objective"] == {"loss": "dapo"}
    assert RunFolder(tmp_path / "run").config.train.custom_loss == f"{tmp_path}/mine.py:dapo"
    assert run(["train", "--train.custom_loss", "mine.py:dopa"]) == 2
    assert "Did you mean 'dapo'" in capsys.readouterr().err
