"""Tinker's losses against NumPy, and against our own objectives where they are the same."""

import numpy as np
import pytest
import torch

from palestra.algo.losses import Objective, policy_loss
from palestra.core.errors import PalestraError
from palestra.extras.tinker.server.training_model import INPUTS, check_loss, token_losses

CLIP = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4}
SETTINGS = {"ppo": CLIP, "cispo": CLIP, "gspo": CLIP, "dro": {"beta": 0.05}}


def numbers(loss_fn: str) -> tuple[np.ndarray, dict[str, np.ndarray], np.ndarray]:
    random = np.random.default_rng(3)
    logprobs = -random.random(40) * 3
    given = {
        "weights": random.normal(size=40),
        "logprobs": logprobs + random.normal(size=40) * 0.5,
        "advantages": random.normal(size=40),
        "sequence_ratio_mask": (random.random(40) < 0.6).astype(float),
    }
    return logprobs, {name: given[name] for name in INPUTS[loss_fn]}, np.repeat([0, 1, 2, 3], 10)


def reference(loss_fn: str, lp: np.ndarray, x: dict[str, np.ndarray], row: np.ndarray) -> float:
    """The formulas of Tinker's documentation, in NumPy."""
    if loss_fn == "cross_entropy":
        return float((-lp * x["weights"]).sum())
    low, high, advantages = 0.7, 1.4, x["advantages"]
    ratio = np.exp(lp - x["logprobs"])
    if loss_fn == "importance_sampling":
        return float(-(ratio * advantages).sum())
    if loss_fn == "cispo":
        return float(-(np.clip(ratio, low, high) * lp * advantages).sum())
    if loss_fn == "dro":
        return float(-(lp * advantages - 0.5 * 0.05 * (lp - x["logprobs"]) ** 2).sum())
    if loss_fn == "gspo":
        mask = x["sequence_ratio_mask"] != 0
        ratio = np.array([np.exp((lp - x["logprobs"])[mask & (row == r)].mean()) for r in row])
    return float(-np.minimum(ratio * advantages, np.clip(ratio, low, high) * advantages).sum())


@pytest.mark.parametrize("loss_fn", INPUTS)
def test_losses_are_those_of_the_documentation(loss_fn: str) -> None:
    lp, given, row = numbers(loss_fn)
    settings = check_loss(loss_fn, SETTINGS.get(loss_fn, {}))
    inputs = {name: torch.from_numpy(values) for name, values in given.items()}
    found = token_losses(loss_fn, settings, torch.from_numpy(lp), inputs, torch.from_numpy(row)).sum()
    assert float(found) == pytest.approx(reference(loss_fn, lp, given, row), rel=1e-6)


@pytest.mark.parametrize(
    ("loss_fn", "objective"),
    [
        ("ppo", Objective(loss="grpo", epsilon=0.2, epsilon_high=0.2)),
        ("cispo", Objective(loss="cispo", epsilon_high=4.0)),
    ],
)
def test_losses_and_gradients_are_those_of_our_own_objectives(loss_fn: str, objective: Objective) -> None:
    lp, given, row = numbers(loss_fn)
    inputs = {name: torch.from_numpy(values) for name, values in given.items()}
    gradients = []
    for ours in (True, False):
        logprobs = torch.from_numpy(lp).requires_grad_()
        if ours:
            losses, _ = policy_loss(
                objective, logprobs, inputs["logprobs"], torch.from_numpy(row), inputs["advantages"], rows=4
            )
        else:
            losses = token_losses(loss_fn, check_loss(loss_fn, {}), logprobs, inputs)
        losses.sum().backward()
        gradients.append((losses.sum().item(), logprobs.grad))
    assert gradients[0][0] == pytest.approx(gradients[1][0], rel=1e-6)
    assert torch.allclose(gradients[0][1], gradients[1][1], rtol=1e-6)


def test_the_sequence_ratio_has_each_tokens_own_gradient() -> None:
    lp, given, row = numbers("gspo")
    inputs = {name: torch.from_numpy(values) for name, values in given.items()}
    logprobs = torch.from_numpy(lp).requires_grad_()
    wide = {"clip_low_threshold": 0.0, "clip_high_threshold": 100.0}
    token_losses("gspo", wide, logprobs, inputs, torch.from_numpy(row)).sum().backward()
    mask = given["sequence_ratio_mask"] != 0
    ratio = np.array([np.exp((lp - given["logprobs"])[mask & (row == r)].mean()) for r in row])
    np.testing.assert_allclose(logprobs.grad.numpy(), -ratio * given["advantages"], rtol=1e-9)


@pytest.mark.parametrize(
    ("loss_fn", "config", "words"),
    [
        ("ppoo", {}, "Did you mean 'ppo'"),
        ("stable_reinforce", {}, "not served here"),
        ("ppo", {"beta": 0.1}, "has no setting 'beta'"),
        ("ppo", {"clip_low_threshold": "low"}, "expected a number"),
        ("dro", {}, "needs loss_fn_config['beta']"),
        ("gspo", {}, "needs loss_fn_config['clip_low_threshold']"),
    ],
)
def test_an_unknown_loss_or_setting_is_refused_by_name(loss_fn: str, config: dict, words: str) -> None:
    with pytest.raises(PalestraError, match=words.replace("[", r"\[").replace("]", r"\]")):
        check_loss(loss_fn, config)
