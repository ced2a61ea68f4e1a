"""Training: the loop, where its groups come from, checkpoints, and `Run`, which assembles all of it.

`loop` knows the interfaces of policy, learner and group source; `setup` and `backend` choose the implementations.
`StepTrainer`, an extra, trains step by step from Python; it is imported on first use because it needs torch.
"""

from __future__ import annotations

from typing import Any

__all__ = ["StepTrainer"]


def __getattr__(name: str) -> Any:
    if name == "StepTrainer":
        from palestra.core.extras import provided

        return provided("StepTrainer")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
