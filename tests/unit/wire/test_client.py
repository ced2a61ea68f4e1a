"""The learner of the wire: logprobs may be missing."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace

import pytest
import torch

from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.types import Sample
from palestra.wire.client import WireClient, WireLearner


def config(**more) -> RunConfig:
    return RunConfig.build({"rollout.temperature": 1.0, "train.learning_rate": 1e-3, **more})


def samples(logprob: float, version: int) -> list[Sample]:
    rows = [((5, 6, 7, 8), 1.0), ((5, 6, 9, 10), -1.0)]
    mask = (False, False, True, True)
    return [Sample(ids, mask, (False,) * 4, (0.0, 0.0, logprob, logprob), a, 0, 2, version) for ids, a in rows]


def weights_after(model, given: list[Sample], **more) -> tuple[torch.Tensor, dict[str, float]]:
    settings = config(**more)
    metrics = WireLearner(model, config=settings).step(given, settings.train)
    return torch.cat([p.detach().flatten() for p in model.parameters()]), metrics


def test_samples_without_logprobs_train_as_the_learners_own(tiny):
    from palestra.models.loading import load_model

    own, _ = weights_after(load_model("palestra/tiny").model, samples(-3.0, 0))
    correction = {"train.importance_correction": "token_truncate"}
    missing, metrics = weights_after(tiny.model, samples(math.nan, -1), **correction)
    assert torch.equal(own, missing)
    assert not {"kl_sampler", "sampler_gap_max"} & set(metrics)
    assert all(math.isfinite(value) for value in metrics.values())


def test_one_missing_logprob_makes_the_whole_batch_the_learners_own(tiny):
    first, second = samples(-3.0, -1)
    _, metrics = weights_after(tiny.model, [first, replace(second, logprobs=(0.0, 0.0, math.nan, math.nan))])
    assert metrics["ratio_max"] == 1.0


def test_given_logprobs_are_the_behaviour_policy(tiny):
    _, metrics = weights_after(tiny.model, samples(-3.0, -1))
    assert metrics["ratio_max"] != 1.0
    assert metrics["sampler_gap_max"] > 0


def test_trajectory_api_that_is_not_there_is_told_with_the_remedy():
    client = WireClient("http://127.0.0.1:9", give_up_s=0)
    with pytest.raises(PalestraError, match="palestra trajectory"):
        asyncio.run(client.batch(0))
