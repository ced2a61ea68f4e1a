"""top_p, top_k and min_p: the learner scores a token by the distribution that it was sampled from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_learner import build, make_samples, settings

from palestra.algo.batch import Batch
from palestra.core.types import SamplingParams
from palestra.engine.sampler import SamplingRow, sample
from palestra.learner.head import LogitRule, score_tokens
from palestra.learner.local import LocalLearner

RULES = [{"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.8}, {"top_k": 12, "top_p": 0.8, "min_p": 0.05}]


def reference(logits: np.ndarray, target: int, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> float:
    """log of the target's probability among the tokens that are left, and itself."""
    order = np.argsort(-logits)
    left = order[: top_k or len(logits)]
    probs = np.exp(logits[left] - logits[left].max())
    probs /= probs.sum()
    before = np.cumsum(probs) - probs
    is_kept = (before < (top_p if top_p < 1 else 2)) & (probs >= min_p * probs[0])
    is_kept[0] = True
    kept = set(left[is_kept].tolist()) | {target}
    return float(logits[target] - np.log(sum(np.exp(logits[i]) for i in kept)))


@pytest.mark.parametrize("rule", RULES)
def test_logprobs_and_gradients_of_a_truncated_distribution_equal_numpy(rule) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(20, 6), torch.randn(32, 6)
    hidden.requires_grad_()
    target = torch.randint(0, 32, (20,))
    logprobs, _ = score_tokens(hidden, weight, None, target, LogitRule(temperature=0.8, **rule))
    logits = (hidden.detach().double() @ weight.double().T / 0.8).numpy()
    theirs = [reference(row, int(y), **rule) for row, y in zip(logits, target, strict=True)]
    assert np.abs(logprobs.detach().numpy() - theirs).max() < 1e-6 * max(1.0, np.abs(theirs).max())

    [gradient] = torch.autograd.grad(logprobs.sum(), hidden)
    step = 1e-5
    for i, j in ((0, 0), (3, 4), (19, 5)):
        moved = []
        for sign in (1, -1):
            changed = hidden.detach().double().clone()
            changed[i, j] += sign * step
            row = (changed[i] @ weight.double().T / 0.8).numpy()
            moved.append(reference(row, int(target[i]), **rule))
        assert gradient[i, j].item() == pytest.approx((moved[0] - moved[1]) / (2 * step), abs=1e-3)


@pytest.mark.parametrize("rule", RULES)
def test_the_entropy_and_its_gradient_are_those_of_what_is_left(rule) -> None:
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(4, 6, requires_grad=True), torch.randn(32, 6), torch.zeros(4, dtype=torch.long)
    _, entropy = score_tokens(hidden, weight, None, target, LogitRule(softcap=30.0, **rule), entropy_gradient=True)
    assert (entropy > 0).all()
    assert (entropy < score_tokens(hidden, weight, None, target, LogitRule(softcap=30.0))[1]).all()
    [gradient] = torch.autograd.grad(entropy.sum(), hidden)
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mode", ["trees", "reference"])
def test_what_the_sampler_records_is_what_the_learner_computes(rule, mode) -> None:
    model = build().eval()
    samples = make_samples(tool_result=())
    config = settings(rollout={"temperature": 0.9, **rule}, train={"share_prefix": mode == "trees"})
    learner = LocalLearner(model, config=config)
    learner._scorer.mode = mode
    params = SamplingParams(8, temperature=0.9, **rule)
    token_ids, recorded, drawn = [], [], []
    for row in samples:  # the tokens that this sampler would draw, one after the other
        ids = row.token_ids[: row.prompt_length].tolist()
        logprobs = [0.0] * len(ids)
        for position in range(len(ids), len(row.token_ids)):
            logits = model(torch.tensor([ids])).logits[0, -1:].detach()
            token, logprob = sample(logits, [SamplingRow(params, position, ids)])
            ids.append(int(token))
            logprobs.append(float(logprob))
        token_ids += ids
        recorded += logprobs
        drawn += [False] * row.prompt_length + [True] * (len(row.token_ids) - row.prompt_length)
    batch = Batch.of(samples)
    batch.token_ids = np.array(token_ids, np.int32)
    ours = learner.forward(batch)
    whole = LocalLearner(build(), config=settings(rollout={"temperature": 0.9})).forward(batch)
    drawn = np.array(drawn)
    assert np.abs(ours[drawn] - np.array(recorded)[drawn]).max() < 1e-4
    assert (whole[drawn] < ours[drawn] - 1e-3).any()  # without it, every ratio is too small by what was cut off
