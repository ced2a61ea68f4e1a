"""TensorBoard's own reader finds what a run wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorboard")


def losses(folder: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= {"loss", "reward_mean", "pass_rate/is exact?"}
    return [(e.step, e.value) for e in events.Scalars("loss")]


def test_the_event_reader_finds_the_scalars(track: Callable[..., Any], tmp_path: Path) -> None:
    track(tmp_path / "run", ["tensorboard"], range(1, 4), None)
    assert losses(tmp_path / "run") == [(1, 0.5), (2, 1.0), (3, 1.5)]


def test_a_resumed_run_shows_each_step_once(track: Callable[..., Any], tmp_path: Path) -> None:
    track(tmp_path / "run", ["tensorboard"], range(1, 6), None)
    track(tmp_path / "run", ["tensorboard"], range(3, 6), 2)
    assert [step for step, _ in losses(tmp_path / "run")] == [1, 2, 3, 4, 5]
