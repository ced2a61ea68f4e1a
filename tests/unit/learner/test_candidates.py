"""Several candidate tokens at each place: the most likely ones, their log-probabilities, and the gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from small_learner import VOCABULARY, build, gradients, make_samples, settings

from palestra.algo.batch import Batch, Targets
from palestra.extras.distill.loss import TEACHER, WEIGHT, DistillLoss, Divergence
from palestra.learner import head, replicas
from palestra.learner.local import LocalLearner
from palestra.learner.lora import add_lora

SAMPLES = make_samples(groups=3, siblings=4)
K = 5


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts of a batch, and several chunks of logits."""
    monkeypatch.setattr(replicas, "WORTH_A_PART", 40)
    monkeypatch.setitem(head.CHUNK_ELEMENTS, "cpu", 128)


def dense_logprobs(model: Any, temperature: float = 1.0) -> torch.Tensor:
    """[M, V] of the model's own logits at the places that predict trained tokens, row after row."""
    rows = []
    for sample in SAMPLES:
        logits = model(torch.tensor(sample.token_ids[None].astype(np.int64))).logits[0]
        at = np.flatnonzero(sample.policy_mask) - 1
        rows.append(torch.log_softmax(logits[at].float() / temperature, dim=-1))
    return torch.cat(rows)


def with_targets(ids: np.ndarray, teacher: np.ndarray, weight: np.ndarray) -> Batch:
    """The rows with [M, k] candidates at their trained places."""
    k = ids.shape[1]
    places = np.concatenate([np.flatnonzero(s.policy_mask) for s in SAMPLES])
    counts = [int(s.policy_mask.sum()) * k for s in SAMPLES]
    inputs = {TEACHER: teacher.astype(np.float32).ravel(), WEIGHT: np.repeat(weight, k).astype(np.float32)}
    targets = Targets(ids.ravel(), np.repeat(places, k), np.cumsum([0, *counts]), inputs, per_place=k)
    batch = Batch.of(SAMPLES)
    batch.targets = targets
    return batch


@pytest.mark.parametrize(
    ("train", "temperature", "adapted"),
    [
        *(({"share_prefix": share}, temperature, []) for share in (True, False) for temperature in (1.0, 0.7)),
        ({"tokens_per_micro_batch": 20}, 1.0, []),
        ({}, 1.0, ["lm_head", "q_proj"]),
    ],
)
def test_the_top_tokens_are_those_of_the_models_own_logits_in_the_order_of_the_batch(train, temperature, adapted):
    config = settings(
        train=train,
        rollout={"temperature": temperature},
        lora={"r": 2 if adapted else 0, "target_modules": adapted or None},
    )
    learner = LocalLearner(add_lora(build(), config.lora) if adapted else build(), config=config)
    for name, p in learner.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p)
    ids, logprobs = learner.top_logprobs(Batch.of(SAMPLES), K)
    with torch.no_grad():
        expected = dense_logprobs(learner.model, temperature).topk(K, dim=-1)
    assert ids.tolist() == expected.indices.tolist()
    np.testing.assert_allclose(logprobs, expected.values.numpy(), rtol=1e-5, atol=1e-4 if adapted else 1e-5)


def test_models_that_are_scored_from_whole_logits_give_the_same() -> None:
    learner, other = (LocalLearner(build(), config=settings(rollout={"temperature": 0.7})) for _ in range(2))
    other._scorer.mode, other._share_prefix = "reference", False
    other._replicas = None
    ours, theirs = (one.top_logprobs(Batch.of(SAMPLES), K) for one in (learner, other))
    assert ours[0].tolist() == theirs[0].tolist()
    np.testing.assert_allclose(ours[1], theirs[1], atol=1e-5)
    batch = with_targets(ours[0], ours[1], np.ones(len(ours[0])))
    np.testing.assert_allclose(learner.forward(batch), other.forward(batch), atol=1e-5)


def test_a_batch_without_trained_tokens_has_no_places() -> None:
    batch = Batch.of(SAMPLES)
    batch.policy_mask = np.zeros_like(batch.policy_mask)
    ids, logprobs = LocalLearner(build(), config=settings()).top_logprobs(batch, K)
    assert ids.shape == logprobs.shape == (0, K)


@pytest.mark.parametrize("share_prefix", [True, False])
def test_forward_gives_the_log_probabilities_of_given_candidates(share_prefix: bool) -> None:
    learner = LocalLearner(build(), config=settings(train={"share_prefix": share_prefix}))
    dense = dense_logprobs(learner.model).detach()
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (len(dense), K))
    found = learner.forward(with_targets(ids, np.zeros_like(ids), np.ones(len(ids)))).reshape(-1, K)
    np.testing.assert_allclose(found, dense.gather(-1, torch.tensor(ids)).numpy(), atol=1e-5)


@pytest.mark.parametrize("share_prefix", [True, False])
@pytest.mark.parametrize(("k", "kind"), [(VOCABULARY, "reverse_kl"), (K, "reverse_kl"), (K, "forward_kl"), (K, "jsd")])
def test_the_gradient_is_that_of_the_dense_divergence(k: int, kind: Divergence, share_prefix: bool) -> None:
    learner = LocalLearner(build(), config=settings(train={"share_prefix": share_prefix}))
    ids, _ = learner.top_logprobs(Batch.of(SAMPLES), k)
    rng = np.random.default_rng(0)
    logits = torch.tensor(rng.normal(size=(len(ids), VOCABULARY)) * 2)
    teacher = torch.log_softmax(logits, -1).float()
    weight = rng.uniform(size=len(ids))
    tail = k < VOCABULARY
    batch = with_targets(ids, teacher.gather(-1, torch.tensor(ids)).numpy(), weight)
    outputs = learner.forward_backward(batch, DistillLoss(kind, k, places_total=len(ids), coefficient=0.5, tail=tail))
    ours = gradients(learner)

    learner.model.zero_grad()
    p, q = dense_logprobs(learner.model).exp(), teacher.exp()
    if tail:
        chosen = torch.tensor(ids)
        p, q = (torch.cat([x.gather(-1, chosen), 1 - x.gather(-1, chosen).sum(-1, keepdim=True)], -1) for x in (p, q))
    m = (p + q) / 2
    each = {
        "reverse_kl": (p * (p / q).log()).sum(-1),
        "forward_kl": (q * (q / p).log()).sum(-1),
        "jsd": ((p * (p / m).log()).sum(-1) + (q * (q / m).log()).sum(-1)) / 2,
    }[kind]
    total = 0.5 * (torch.tensor(weight).float() * each).mean()
    total.backward()
    assert outputs.metrics()["distill_loss"] == pytest.approx(total.item(), abs=1e-6)
    torch.testing.assert_close(ours, gradients(learner), rtol=1e-4, atol=1e-6)
