"""A base in 4 bits: engine and learner take their fast paths, agree with each other, and adapters learn.

Needs bitsandbytes (`palestra[qlora]`); on a GPU, or on a CPU with bitsandbytes' own code for it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("bitsandbytes")

from palestra.algo.batch import Batch
from palestra.algo.losses import Objective
from palestra.algo.step_loss import StepLoss
from palestra.core.config import RunConfig
from palestra.core.types import Sample, SamplingParams
from palestra.learner import lora
from palestra.learner.local import LocalLearner
from palestra.models.loading import load_model
from palestra.policy.build import build_policy
from palestra.policy.local import LocalPolicy

PROMPT = [5, 17, 99, 23, 64, 3, 42, 81, 7, 12, 90, 31, 56, 44, 8, 77, 15, 60, 29]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    config = RunConfig.build({"lora.load_in_4bit": True})
    with monkeypatch.context() as patch:  # the setting asks for a GPU; the layers do not
        patch.setattr(torch.cuda, "is_available", lambda: True)
        quantization = lora.quantization_config(config.lora)
    loaded = load_model("palestra/tiny", dtype="bfloat16", quantization=quantization)
    return lora.add_lora(loaded.model, config.lora)


def test_sampler_and_learner_agree_on_a_4_bit_base_and_a_step_makes_what_was_good_more_likely(model: Any) -> None:
    policy = build_policy(model, None, "paged")
    assert isinstance(policy, LocalPolicy)
    learner = LocalLearner(model, config=RunConfig.build({"lora.load_in_4bit": True, "rollout.temperature": 1.0}))
    assert learner._scorer.mode == "trees"
    group = policy.engine.fork(policy.engine.open(PROMPT), 2)
    turns = policy.engine.sample(group, [SamplingParams(12, seed=seed) for seed in range(2)])
    samples = [
        Sample(
            session.token_ids,
            policy_mask=[False] * len(PROMPT) + [True] * len(turn.token_ids),
            echo_mask=[False] * len(session.token_ids),
            logprobs=[0.0] * len(PROMPT) + turn.logprobs.tolist(),
            advantages=1.0 if number == 0 else -1.0,
            prompt_length=len(PROMPT),
        )
        for number, (session, turn) in enumerate(zip(group, turns, strict=True))
    ]

    def learned() -> list[Any]:
        batch = Batch.of(samples)
        return [row[len(PROMPT) :] for row in batch.split(learner.forward(batch))]

    before = learned()
    for own, turn in zip(before, turns, strict=True):
        assert abs(own - turn.logprobs).mean() < 0.1  # of bfloat16
    outputs = learner.forward_backward(
        Batch.of(samples), StepLoss.of(Batch.of(samples), Objective(loss="dapo"), max_completion_length=12)
    )
    assert outputs.metrics()["loss"] == pytest.approx(0.0, abs=0.2)
    assert learner.optim_step(3e-3, max_grad_norm=1.0) > 0
    policy.update(learner.weights(1))
    after = learned()
    assert after[0].sum() > before[0].sum()
    assert after[1].sum() < before[1].sum()
    assert {name.split(".lora_")[1][0] for name in learner.weights(1).tensors()} == {"A", "B"}
