"""The learning-rate schedule, the number of steps, and how large an update may be."""

import pytest

from palestra.core.config import RunConfig
from palestra.core.config_sections import TrainSection
from palestra.core.errors import SettingError
from palestra.train.update import learning_rate_at, total_steps, update_scale


def test_warmup_rises_to_the_full_rate_and_the_schedule_falls_to_zero() -> None:
    train = TrainSection(learning_rate=1.0, warmup_steps=4, scheduler="linear")
    rates = [learning_rate_at(step, train, 12) for step in range(13)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert (rates[8], rates[12]) == (pytest.approx(0.5), 0.0)
    assert learning_rate_at(5, TrainSection(learning_rate=1.0, scheduler="cosine"), 10) == pytest.approx(0.5)
    with pytest.raises(SettingError, match="max_steps"):
        learning_rate_at(0, TrainSection(scheduler="linear"), None)


def test_total_steps_cover_all_epochs_unless_limited() -> None:
    config = RunConfig.build({"train": {"epochs": 3, "problems_per_step": 4}})
    assert total_steps(config, 10) == 9
    assert total_steps(RunConfig.build({"train": {"max_steps": 5}}), 10) == 5
    unsaid = RunConfig.build({"train.problems_per_step": 4})
    assert (total_steps(unsaid, 90), total_steps(unsaid, 400)) == (40, 100)
    with pytest.raises(SettingError, match=r"train\.max_steps"):
        total_steps(config, None)


@pytest.mark.parametrize(
    ("signal", "solved", "problems", "scale"),
    [
        (0, 0, 32, 0.0),
        (1, 0, 32, 0.125),
        (4, 0, 32, 0.5),
        (8, 0, 32, 1.0),
        (0, 64, 64, 0.0),
        (1, 63, 64, 1.0),
        (1, 7, 64, 0.5),
    ],
)
def test_an_update_grows_with_the_groups_that_have_signal_or_are_solved(signal, solved, problems, scale) -> None:
    assert update_scale(signal, solved, problems, 0.25) == scale
