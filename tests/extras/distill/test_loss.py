"""The distillation loss against NumPy, and against the dense divergence with autograd."""

import numpy as np
import pytest
import torch

from palestra.algo.batch import Batch, Targets
from palestra.algo.step_loss import LossTokens
from palestra.extras.distill.loss import LOWEST_LOGPROB, TEACHER, WEIGHT, DistillLoss, Divergence, divergence, log_tail

VOCABULARY, PLACES = 12, 5
KINDS: tuple[Divergence, ...] = ("reverse_kl", "forward_kl", "jsd")


def distributions(seed: int) -> torch.Tensor:
    """[places, vocabulary] log-probabilities."""
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(2 * torch.randn(PLACES, VOCABULARY, generator=generator, dtype=torch.float64), dim=-1)


def reference(p: np.ndarray, q: np.ndarray, kind: str) -> np.ndarray:
    """[places] from probabilities."""

    def kl(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.sum(a * np.log(a / b), axis=-1)

    m = (p + q) / 2
    return {"reverse_kl": kl(p, q), "forward_kl": kl(q, p), "jsd": (kl(p, m) + kl(q, m)) / 2}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_candidates_and_the_tail_are_one_distribution(kind: Divergence) -> None:
    student, teacher = distributions(0), distributions(1)
    ids = student.topk(4, dim=-1).indices
    found = divergence(student.gather(-1, ids), teacher.gather(-1, ids), kind, tail=True)
    p, q = (x.exp().gather(-1, ids).numpy() for x in (student, teacher))
    p, q = (np.concatenate([x, 1 - x.sum(-1, keepdims=True)], axis=-1) for x in (p, q))
    np.testing.assert_allclose(found.numpy(), reference(p, q, kind), rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_with_the_whole_vocabulary_it_is_exact_and_more_than_with_a_tail(kind: Divergence) -> None:
    student, teacher = distributions(0), distributions(1)
    exact = divergence(student, teacher, kind, tail=False)
    np.testing.assert_allclose(exact.numpy(), reference(student.exp().numpy(), teacher.exp().numpy(), kind), rtol=1e-9)
    ids = student.topk(4, dim=-1).indices
    bound = divergence(student.gather(-1, ids), teacher.gather(-1, ids), kind, tail=True)
    assert (bound < exact).all()
    assert (bound > 0).all()


def test_the_tail_of_a_whole_vocabulary_is_finite() -> None:
    whole = torch.zeros(1, 1)
    assert log_tail(whole).item() == pytest.approx(np.log(1e-7), rel=1e-5)
    student = whole.clone().requires_grad_()
    divergence(student, whole, "reverse_kl", tail=True).sum().backward()
    assert student.grad is not None
    assert student.grad.isfinite().all()


def test_a_token_that_the_teacher_rules_out_gives_a_finite_loss() -> None:
    student, teacher = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.0, -torch.inf]])
    found = divergence(student, teacher, "reverse_kl", tail=False).item()
    assert found == pytest.approx(np.log(0.5) - 0.5 * LOWEST_LOGPROB)


def tokens_of(teacher: torch.Tensor, weights: torch.Tensor) -> LossTokens:
    k = teacher.shape[1]
    inputs = {TEACHER: teacher.flatten(), WEIGHT: weights.repeat_interleave(k)}
    row = torch.tensor([0, 0, 0, 1, 1]).repeat_interleave(k)
    return LossTokens(rows=2, row=row, inputs=inputs)


def test_the_gradient_by_logits_is_that_of_the_dense_reverse_kl() -> None:
    logits, teacher = 2 * distributions(0), distributions(1)
    logits = logits.clone().requires_grad_()
    weights = torch.tensor([1.0, 0.5, 0.0, 0.25, 1.0], dtype=torch.float64)
    loss = DistillLoss("reverse_kl", VOCABULARY, places_total=8.0, coefficient=0.3, tail=False)
    found = loss(tokens_of(teacher, weights), torch.log_softmax(logits, -1).flatten(), None)
    (found.terms * torch.tensor(loss.weights)).sum().backward()
    ours = logits.grad

    dense = logits.detach().clone().requires_grad_()
    p = torch.softmax(dense, -1)
    total = 0.3 * (weights * (p * (p.log() - teacher)).sum(-1)).sum() / 8.0
    total.backward()
    torch.testing.assert_close(ours, dense.grad, rtol=0, atol=1e-8)
    assert found.row.tolist() == [0, 0, 0, 1, 1]
    assert loss.metrics(found.terms, found.stats)["loss"] == pytest.approx(total.item())


def test_places_of_weight_0_need_no_backward_pass() -> None:
    inputs = {WEIGHT: np.array([0, 0, 1, 1], np.float32)}
    targets = Targets(np.zeros(4, int), np.array([1, 1, 2, 2]), np.array([0, 4]), inputs, per_place=2)
    batch = Batch.of_targets([np.array([1, 2, 3])], targets, np.zeros(1, int), np.ones(1, int))
    loss = DistillLoss("reverse_kl", 2, places_total=2.0)
    assert not loss.has_gradient(batch, np.array([0, 1]))
    assert loss.has_gradient(batch, np.array([0, 1, 2, 3]))
