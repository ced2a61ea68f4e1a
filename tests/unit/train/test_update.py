"""One step's update by the learner's primitives: minibatches, iterations, normalisers, behaviour log-probabilities."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from builders import samples_of
from loop_fakes import SMALL, FakeLearner, FakeOutputs

from palestra.algo.batch import Batch
from palestra.algo.step_loss import StepLoss
from palestra.core.config import RunConfig
from palestra.core.types import Sample
from palestra.train.update import Coefficients, behaviour_logprobs, combine, update

NOW = 3
MASK = (False, False, True, True)
SAMPLE = Sample((1, 2, 3, 4), MASK, (False,) * 4, (0.0, 0.0, -0.5, -0.25), 1.0, versions=NOW)  # type: ignore[arg-type]
STALE = replace(SAMPLE, versions=NOW - 1)  # type: ignore[arg-type]
MIXED = replace(SAMPLE, versions=np.array([0, 0, NOW - 1, NOW]))
UNKNOWN = replace(SAMPLE, logprobs=np.array([0, 0, np.nan, np.nan], dtype=np.float32), versions=NOW - 1)  # type: ignore[arg-type]
MASKED = replace(SAMPLE, policy_mask=np.zeros(4, dtype=bool))


class Recorded(FakeLearner):
    """Keeps what each forward_backward was given."""

    def __init__(self) -> None:
        super().__init__([])
        self.batches: list[tuple[list[float], Any]] = []

    def forward_backward(self, batch: Batch, loss: StepLoss) -> FakeOutputs:
        old = None if batch.old_logprobs is None else [row.tolist() for row in batch.split(batch.old_logprobs)]
        self.batches.append(([float(s.advantages[0]) for s in samples_of(batch)], old))
        return super().forward_backward(batch, loss)


def run(samples: Sequence[Sample], **train: Any) -> tuple[Recorded, dict[str, float]]:
    learner = Recorded()
    config, coefficients = RunConfig.build(SMALL, {"train": train}), Coefficients(0.1, echo=0.0, entropy=0.0)
    work = lambda: learner.calls.append("host work")  # noqa: E731
    return learner, update(learner, Batch.of(samples), config, coefficients, NOW, host_work=work)


def numbered(count: int) -> list[Sample]:
    return [replace(SAMPLE, advantages=float(i)) for i in range(count)]  # type: ignore[arg-type]


def test_minibatches_are_optimizer_steps_in_order_and_iterations_passes_over_them() -> None:
    learner, _ = run(numbered(4), minibatches=2, iterations=2)
    assert [rows for rows, _ in learner.batches] == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert learner.weight == 4
    # what an update of this step would change before it is read, is computed before the first
    step = ["forward_backward", "optim_step"]
    assert learner.calls == ["forward", "forward", *step, "host work", *step * 3], "which is done once"


def test_a_single_step_computes_no_behaviour_logprobs_and_later_passes_use_those_of_the_first() -> None:
    learner, _ = run([SAMPLE], iterations=3)
    assert "forward" not in learner.calls
    assert [old for _, old in learner.batches] == [None, [[-1.0] * 4], [[-1.0] * 4]]


def test_the_behaviour_policy_is_the_sampler_where_it_was_older_token_by_token() -> None:
    nan = pytest.approx(float("nan"), nan_ok=True)
    learner, _ = run([SAMPLE, STALE, MIXED, UNKNOWN])
    [(_, old)] = learner.batches
    assert old == [[nan] * 4, [nan, nan, -0.5, -0.25], [nan, nan, -0.5, nan], [nan] * 4]
    assert "forward" not in learner.calls
    both = Batch.of([SAMPLE, MIXED])
    own = behaviour_logprobs(learner, both, NOW, several=True)
    assert own is not None
    assert [row.tolist() for row in both.split(own)] == [[-2.0] * 4, [-2.0, -2.0, -0.5, -2.0]]


def test_the_reference_is_asked_once_a_batch_and_only_for_a_kl_term() -> None:
    learner, _ = run(numbered(2), beta=0.1, minibatches=2, iterations=2)
    assert learner.calls.count("forward reference") == 2
    assert "forward reference" not in run(numbered(2))[0].calls


@pytest.mark.parametrize(("loss", "totals"), [("dapo", [3.0, 3.0]), ("vespo", [3.0, 3.0]), ("bnpo", [4.0, 2.0])])
def test_batch_token_losses_divide_by_an_equal_share_of_the_batch(loss: str, totals: list[float]) -> None:
    learner, metrics = run([SAMPLE, SAMPLE, SAMPLE, MASKED], minibatches=2, loss=loss)
    assert [found.tokens_total for found in learner.losses] == totals
    assert [found.rows for found in learner.losses] == [2, 2]
    assert metrics["tokens_trained"] == 6


def test_a_minibatch_without_tokens_takes_no_optimizer_step() -> None:
    learner, _ = run([MASKED, SAMPLE], minibatches=2)
    assert learner.weight == 1
    learner, metrics = run([MASKED])
    assert learner.weight == 0
    assert metrics["loss"] == 0.0


def test_a_sampler_whose_logprobs_are_not_known_is_not_compared_with_the_policy() -> None:
    class Compared(FakeOutputs):
        def metrics(self) -> dict[str, float]:
            return super().metrics() | {"kl_sampler": 0.1, "sampler_gap_max": 0.2}

    class Comparing(Recorded):
        def forward_backward(self, batch: Batch, loss: StepLoss) -> FakeOutputs:
            return Compared(batch, 1.0)

    def compared(*samples: Sample) -> dict[str, float]:
        return update(Comparing(), Batch.of(samples), RunConfig.build(SMALL), Coefficients(0.1, 0.0, 0.0), NOW)

    assert compared(SAMPLE, UNKNOWN)["kl_sampler"] == 0.1
    assert not {"kl_sampler", "sampler_gap_max"} & compared(UNKNOWN).keys()


def test_combined_metrics_are_means_maxima_and_sums_over_a_pass() -> None:
    first = {"loss": 1.0, "ratio_max": 2.0, "tokens_computed": 10.0, "echo_loss": 4.0}
    second = {"loss": 3.0, "ratio_max": 1.0, "tokens_computed": 6.0}
    found = combine([first, second, first, second], iterations=2)
    assert found == {"loss": 2.0, "ratio_max": 2.0, "tokens_computed": 16.0, "echo_loss": 4.0}
