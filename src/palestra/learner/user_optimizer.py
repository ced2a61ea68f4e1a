"""The user's own optimizer and scheduler in the learner's place for them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from palestra.core.errors import PalestraError
from palestra.learner.optimizer import Optimizer


class UserOptimizer(Optimizer):
    """AdamW by the config until an optimizer is given, then that one."""

    _user: Any = None
    _scheduler: Any = None

    def use(self, optimizer: Any | None, scheduler: Any | None) -> None:
        """From now on step this optimizer (or the scheduler's own), and the scheduler once a training step."""
        if self._pairs:
            raise PalestraError(
                "model.master_weights keeps its own copies of the weights, which another optimizer does not update; "
                "set it to false, or leave the optimizer out"
            )
        chosen = optimizer if optimizer is not None else getattr(scheduler, "optimizer", None)
        if chosen is None:
            raise PalestraError("a scheduler without its optimizer cannot be used; give the optimizer too")
        held = {id(p) for group in chosen.param_groups for p in group["params"]}
        if not any(id(weight) in held for weight in self.weights):
            raise PalestraError("the optimizer holds no trainable weight of this model; build it from this model's")
        self._user, self._scheduler = chosen, scheduler

    @property
    def can_skip(self) -> bool:
        return self._user is None and super().can_skip

    def step(self, learning_rate: float, finite: Tensor | None = None) -> None:
        if self._user is None:
            super().step(learning_rate, finite)
            return
        self._user.step()
        self.clear()

    def after_step(self) -> dict[str, float]:
        """Move the scheduler on; gives the learning rate that the step had, where it is not the config's."""
        if self._user is None:
            return {}
        learning_rate = float(self._user.param_groups[0]["lr"])
        if self._scheduler is not None:
            self._scheduler.step()
        return {"learning_rate": learning_rate}
