"""CUDA out of memory: the micro-batch is halved, the gradient stays the same, and it is said once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from small_learner import build, gradients, loss_of, make_samples

from palestra.algo.batch import Batch
from palestra.core.config import RunConfig
from palestra.core.types import Sample
from palestra.learner.local import LocalLearner


def make_learner(tokens: int = 512, **train: Any) -> LocalLearner:
    config = RunConfig.build({"train": {"tokens_per_micro_batch": tokens, **train}, "rollout": {"temperature": 1.0}})
    return LocalLearner(build(), config=config)


def rows(groups: int = 4, siblings: int = 4, prompt: int = 8, new: int = 10) -> list[Sample]:
    shape: dict[str, Any] = {"prompt": prompt, "lengths": lambda sibling: new + sibling}
    return make_samples(groups=groups, siblings=siblings, tool_result=(), **shape)


@contextmanager
def memory_for(learner: LocalLearner, tokens: int, where: str) -> Iterator[list[int]]:
    """A GPU that holds micro-batches up to so many tokens: a larger one fails in its forward pass, or at the end of
    its backward pass, when most weights have their gradient. Gives the sizes of those that were tried."""
    tried: list[int] = []
    score = learner._scorer.forward

    def scored(micro: Any, **options: Any) -> Any:
        tried.append(len(micro.token_ids))
        if where == "forward":
            fail()
        return score(micro, **options)

    def fail(gradient: Any = None) -> None:
        if tried[-1] > tokens:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    first = next(learner.model.model.layers[0].self_attn.q_proj.parameters())
    hook = first.register_hook(fail) if where == "backward" else None
    learner._scorer.forward = scored  # type: ignore[method-assign]
    try:
        yield tried
    finally:
        learner._scorer.forward = score  # type: ignore[method-assign]
        if hook is not None:
            hook.remove()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_micro_batch_four_times_too_large_gives_the_same_gradient_and_one_warning(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    samples = rows()
    expected, learner = make_learner(), make_learner()
    reference = expected.forward_backward(Batch.of(samples), loss_of(samples))
    with caplog.at_level(logging.WARNING, "palestra"), memory_for(learner, 52, where) as tried:
        for _ in range(2):
            learner.optimizer.clear()
            learner._pending.clear()
            found = learner.forward_backward(Batch.of(samples), loss_of(samples))
    assert max(tried) > 4 * 48
    torch.testing.assert_close(gradients(learner), gradients(expected), atol=1e-6, rtol=1e-5)
    metrics, wanted = found.metrics(), reference.metrics()
    for name in ("loss", "entropy", "ratio_mean"):
        assert metrics[name] == pytest.approx(wanted[name], abs=1e-6)
    assert found.logprobs() == pytest.approx(reference.logprobs(), abs=1e-5, nan_ok=True)
    [warning] = [record.getMessage() for record in caplog.records]
    assert "train.tokens_per_micro_batch" in warning
    assert "the gradient is the same" in warning
    assert learner.optim_step(1e-3, max_grad_norm=1.0) > 0


def test_what_is_accumulated_is_kept_and_only_the_rest_is_computed_again() -> None:
    samples = [*rows(2, 2), *rows(1, 8, new=20)]  # the last group is larger than those before it
    learner = make_learner(tokens=200)
    packed = learner._pack(Batch.of(samples), echo=False)
    sizes = [len(micro.token_ids) for micro in packed]
    assert len(sizes) == 2
    with memory_for(learner, sizes[0] + 50, "forward") as tried:
        learner.forward_backward(Batch.of(samples), loss_of(samples))
    assert tried[:2] == sizes
    assert sizes[0] not in tried[2:]
    assert sum(tried[2:]) < sizes[1] + 3 * 8  # the prompt once more for each part


def test_the_smaller_micro_batch_stays_for_the_steps_that_follow() -> None:
    samples, learner = rows(), make_learner()
    with memory_for(learner, 52, "forward") as tried:
        learner.forward_backward(Batch.of(samples), loss_of(samples))
        learner.optim_step(1e-3, max_grad_norm=1.0)
        failed = sum(size > 52 for size in tried)
        tried.clear()
        learner.forward_backward(Batch.of(samples), loss_of(samples))
    assert failed == 2
    assert max(tried) <= 52


def test_forward_alone_is_computed_in_parts_too() -> None:
    samples, learner = rows(), make_learner()
    expected = make_learner().forward(Batch.of(samples))
    with memory_for(learner, 52, "forward"):
        found = learner.forward(Batch.of(samples))
    assert found == pytest.approx(expected, abs=1e-5, nan_ok=True)


def test_with_master_weights_a_failed_gradient_is_forgotten_and_those_before_it_are_kept() -> None:
    samples = rows()
    first, rest = samples[:4], samples[4:]
    learners = []
    for _ in range(2):
        learners.append(LocalLearner(build(torch.bfloat16), config=RunConfig.build({"rollout": {"temperature": 1.0}})))
    expected, learner = learners
    learner._limit.tokens = expected._limit.tokens = 60
    learner.forward_backward(Batch.of(first), loss_of(samples))
    learner._limit.tokens = 512
    with memory_for(learner, 60, "backward") as tried:
        learner.forward_backward(Batch.of(rest), loss_of(samples))
    assert max(tried) > 60
    for part in (first, rest):
        expected.forward_backward(Batch.of(part), loss_of(samples))
    for one in learners:
        one.optimizer.accumulate_into_masters()
    pairs = zip(learner.optimizer.masters, expected.optimizer.masters, strict=True)
    assert all(torch.allclose(a.grad, b.grad, atol=2e-3) for a, b in pairs)  # type: ignore[arg-type]


def test_one_row_that_does_not_fit_is_an_error_and_leaves_no_gradient() -> None:
    samples, learner = rows(), make_learner()
    with memory_for(learner, 3, "forward"), pytest.raises(torch.OutOfMemoryError, match="cannot be divided"):
        learner.forward_backward(Batch.of(samples), loss_of(samples))
    assert gradients(learner) == {}


def test_a_gradient_that_waits_from_an_earlier_batch_is_never_mixed_with_half_of_another() -> None:
    samples, learner = rows(), make_learner()
    first, rest = samples[:4], samples[4:]
    with memory_for(learner, 60, "backward"):
        learner.forward_backward(Batch.of(first), loss_of(samples))
        with pytest.raises(torch.OutOfMemoryError, match="later batch"):
            learner.forward_backward(Batch.of(rest), loss_of(samples))
    assert gradients(learner) == {}
