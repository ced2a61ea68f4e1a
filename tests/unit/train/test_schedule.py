"""The learning-rate schedule."""

from __future__ import annotations

import pytest

from palestra.core.config_sections import TrainSection
from palestra.core.errors import PalestraError
from palestra.train.schedule import learning_rate_at


def test_warmup_rises_to_the_full_rate_and_the_schedule_falls_to_zero() -> None:
    train = TrainSection(learning_rate=1.0, warmup_steps=4, scheduler="linear")
    rates = [learning_rate_at(step, train, 12) for step in range(13)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[8] == pytest.approx(0.5)
    assert rates[12] == 0.0
    cosine = TrainSection(learning_rate=1.0, scheduler="cosine")
    assert learning_rate_at(5, cosine, 10) == pytest.approx(0.5)


def test_a_schedule_that_ends_needs_to_know_when() -> None:
    with pytest.raises(PalestraError, match="max_steps"):
        learning_rate_at(0, TrainSection(scheduler="linear"), None)
