"""The training loop and its learners. `StepTrainer` is imported when it is asked for: it needs torch."""

from __future__ import annotations

from typing import Any

__all__ = ["StepTrainer"]


def __getattr__(name: str) -> Any:
    if name == "StepTrainer":
        from palestra.train.step_trainer import StepTrainer

        return StepTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
