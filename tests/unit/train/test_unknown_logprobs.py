"""Samples whose logprobs the sampler did not tell (NaN): token by token, they count as the current policy's own."""

import math
from dataclasses import replace

import numpy as np
import torch

from palestra.algo.batch import Batch
from palestra.core.config import RunConfig
from palestra.core.types import Sample
from palestra.learner.local import LocalLearner
from palestra.models.loading import load_model
from palestra.train.update import coefficients_at, update

NOW, EARLIER = 3, 2  # policy versions


def samples(logprobs: tuple[float, float], version: int) -> list[Sample]:
    rows = [((5, 6, 7, 8), 1.0), ((5, 6, 9, 10), -1.0)]
    mask = (False, False, True, True)
    return [Sample(ids, mask, (False,) * 4, (0.0, 0.0, *logprobs), a, 0, 2, version) for ids, a in rows]


def trained(batch: list[Sample], **settings) -> tuple[torch.Tensor, dict[str, float]]:
    """The weights of the embedded model after one step, and the step's metrics."""
    config = RunConfig.build({"rollout.temperature": 1.0, "train.learning_rate": 1e-3, **settings})
    learner = LocalLearner(load_model("palestra/tiny").model, config=config)
    metrics = update(learner, Batch.of(batch), config, coefficients_at(0, config, None, 0.0), NOW)
    return torch.cat([p.detach().flatten() for p in learner.model.parameters()]), metrics


def own_logprobs(batch: list[Sample]) -> np.ndarray:
    config = RunConfig.build({"rollout.temperature": 1.0})
    return LocalLearner(load_model("palestra/tiny").model, config=config).forward(Batch.of(batch))


def test_samples_without_logprobs_train_as_the_learners_own():
    own, _ = trained(samples((-3.0, -3.0), NOW))
    correction = {"train.importance_correction": "token_truncate"}
    unknown, metrics = trained(samples((math.nan, math.nan), EARLIER), **correction)
    assert torch.equal(own, unknown)
    assert not {"kl_sampler", "sampler_gap_max"} & set(metrics)
    assert metrics["ratio_max"] == 1.0
    assert all(math.isfinite(value) for value in metrics.values())


def test_unknown_logprobs_leave_the_known_ones_the_behaviour_policys():
    first, second = samples((-20.0, -3.0), EARLIER)  # less likely than now, so that its ratio is above 1
    unknown = [first, replace(second, logprobs=(0.0, 0.0, math.nan, -2.0))]
    filled = np.where(np.isnan(unknown[1].logprobs), own_logprobs(unknown)[4:], unknown[1].logprobs)
    correction = {"train.importance_correction": "token_truncate", "train.importance_cap": 1.5}
    weights, metrics = trained(unknown, **correction)
    expected, as_known = trained([first, replace(second, logprobs=filled)], **correction)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-6)
    assert metrics["ratio_max"] > 1.0
    assert math.isclose(metrics["ratio_max"], as_known["ratio_max"], rel_tol=1e-5)
    assert all(math.isfinite(value) for value in metrics.values())


def test_several_passes_take_the_unknown_logprobs_of_the_first():
    passes = {"train.iterations": 2}
    own, _ = trained(samples((-3.0, -3.0), NOW), **passes)
    unknown, metrics = trained(samples((math.nan, math.nan), EARLIER), **passes)
    assert torch.equal(own, unknown)
    assert metrics["ratio_max"] != 1.0, "the second pass is off-policy"
