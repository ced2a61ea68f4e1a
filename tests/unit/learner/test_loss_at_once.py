"""A loss that is a sum over tokens: the head takes its gradient chunk by chunk, and computes no logits twice."""

from __future__ import annotations

import random
from functools import partial
from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from palestra.algo.batch import Batch
from palestra.algo.losses import ImportanceCorrection, LossName, Objective
from palestra.algo.step_loss import LossTokens, StepLoss
from palestra.core.config import RunConfig
from palestra.core.types import Sample
from palestra.learner import head
from palestra.learner.head import LogitRule, score_tokens
from palestra.learner.local import LocalLearner

OBJECTIVES = [
    *(Objective(loss=loss) for loss in get_args(LossName)),
    *(Objective(importance_correction=how) for how in get_args(ImportanceCorrection)),
    Objective(ratio="sequence"),
    Objective(beta=0.1, kl_bias_correction=True),
    Objective(delta=1.5, off_policy_mask_threshold=0.0),
]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_gradients_of_parts_are_those_of_the_whole_if_the_loss_is_a_sum_over_tokens(objective: Objective) -> None:
    torch.manual_seed(0)
    row, entropy = torch.arange(5).repeat_interleave(4), torch.rand(20)
    logprobs = -torch.rand(20) * 2
    sampler, old, reference = (logprobs + 0.3 * torch.randn(3, 20)).unbind()
    sampler, old = (torch.where(torch.rand(20) < 0.2, torch.nan, x) for x in (sampler, old))
    step = StepLoss(objective, 5, 20, 20.0, 8, entropy_coefficient=0.01)
    inputs = {"logprobs": sampler, "advantages": -torch.rand(20), "old_logprobs": old, "ref_logprobs": reference}
    tokens = LossTokens(5, row, inputs, policy_lengths=torch.full((5,), 4))
    assert (step.gradient(tokens) is None) == (not objective.is_sum_over_tokens)
    gradient = partial(step._gradient, tokens)
    whole = gradient(logprobs, entropy, slice(0, 20))
    slices = [slice(a, b) for a, b in pairwise((0, 3, 6, 7, 9, 14, 17, 20))]  # which divide rows
    parts = zip(*(gradient(logprobs[part], entropy[part], part) for part in slices), strict=True)
    same = all(torch.allclose(a, torch.cat(b), atol=1e-6) for a, b in zip(whole, parts, strict=True))
    assert same == objective.is_sum_over_tokens


@pytest.mark.parametrize("steer", [False, True])
def test_the_head_has_the_same_gradients_at_once_and_later(steer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(head, "CHUNK_ELEMENTS", {"cpu": 0})  # chunks of 128 tokens
    inputs = [torch.randn(*shape).bfloat16() for shape in ((300, 8), (40, 8), (40,), (300, 2), (40, 2))]
    target, upstream = torch.randint(0, 40, (300,)), torch.randn(2, 300)
    results = []
    for at_once in (True, False):
        monkeypatch.setattr(head, "KEPT_BYTES", {"cpu": 1})
        hidden, weight, bias, low, up = leaves = [x.clone().requires_grad_() for x in inputs]
        logprobs, entropy = score_tokens(
            hidden,
            weight,
            bias,
            target,
            LogitRule(temperature=0.7),
            entropy_gradient=steer,
            adapter=(low, up),
            loss_gradient=(lambda _, __, part: (upstream[0, part], upstream[1, part])) if at_once else None,
        )
        ((logprobs * upstream[0]).sum() + (entropy * upstream[1]).sum() * steer).backward()
        results.append([logprobs, entropy, *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*results, strict=True):
        assert ours is not None
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("loss", ["dapo", "gspo"])
def test_logits_are_computed_twice_only_if_a_tokens_loss_depends_on_others(
    loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    logits = head._logits
    monkeypatch.setattr(head, "_logits", lambda *parts: calls.append(len(parts[0])) or logits(*parts))
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(**shape, head_dim=8, intermediate_size=16, vocab_size=32)
    rng, samples = random.Random(0), []
    for i in range(6):
        tokens, mask = [rng.randrange(32) for _ in range(9 + i)], [False] * 3 + [True] * (6 + i)
        samples.append(Sample(tokens, mask, [False] * len(mask), [-3.0] * len(mask), i - 2.5, i, 3))  # type: ignore[arg-type]
    gradients: list[list[torch.Tensor]] = []
    for kept in ({}, {"cpu": 1}):
        monkeypatch.setattr(head, "KEPT_BYTES", kept)
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        settings = RunConfig.build({"train": {"loss": loss}, "rollout": {"temperature": 1.0}})
        learner = LocalLearner(model, config=settings)
        calls.clear()
        objective = Objective(loss=loss)  # type: ignore[arg-type]
        batch = Batch.of(samples)
        learner.forward_backward(batch, StepLoss.of(batch, objective, max_completion_length=16))
        gradients.append([p.grad for p in model.parameters()])
    assert len(calls) == (1 if loss == "dapo" else 2)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
