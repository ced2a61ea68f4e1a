"""AdamW over a model's trainable weights, with float32 master copies if enabled, or the user's own optimizer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from palestra.core.config_sections import TrainSection
from palestra.core.errors import SettingError, StateError

log = logging.getLogger("palestra")


class Optimizer:
    """Gradients in, one AdamW update out.

    With `master_weights`, low-precision weights have float32 copies that receive the updates; the model gets the
    rounded result. Before another backward pass, `accumulate_into_masters` adds up the last one's gradients in float32.
    """

    def __init__(self, model: nn.Module, train: TrainSection, *, master_weights: bool = False) -> None:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.names, self.weights = list(trained), list(trained.values())
        if not self.weights:
            raise SettingError("the model has no trainable weight; unfreeze it or add LoRA adapters")
        self.masters: list[Tensor] = []
        self._pairs: list[tuple[nn.Parameter, Tensor]] = []
        for weight in self.weights:
            master: Tensor = weight
            if master_weights and weight.dtype != torch.float32:
                master = weight.detach().float()
                self._pairs.append((weight, master))
            self.masters.append(master)
        groups = [
            {"params": [m for m in self.masters if m.dim() >= 2], "weight_decay": train.weight_decay},
            {"params": [m for m in self.masters if m.dim() < 2], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=0.0,  # each step says its own
            betas=(train.adam_beta1, train.adam_beta2),
            fused=True,
        )

        self._clip_factor: Tensor | None = None  # of gradients that the kernel will scale
        # How many steps the masters that the kernel updated last have had: one tensor, and its parts in their states.
        self._steps: tuple[Tensor, Sequence[Tensor]] = (torch.empty(0), ())

    @property
    def supports_conditional_step(self) -> bool:
        """Whether a step can be launched before it is known to be sound: the GPU then leaves the weights alone."""
        return self.weights[0].is_cuda and not isinstance(self.weights[0], DTensor)

    @cached_property
    def by_kernel(self) -> bool:
        """Whether one kernel makes the whole update: of a model on a GPU that has a master for every weight."""
        return (
            self.supports_conditional_step
            and len(self._pairs) == len(self.weights)
            and len({weight.dtype for weight in self.weights}) == 1
            and all(weight.is_contiguous() for weight in self.weights)
        )

    @torch.no_grad()
    def accumulate_into_masters(self) -> None:
        """Add what the last backward pass left at low-precision weights to the sums at their masters."""
        first: list[tuple[nn.Parameter, Tensor]] = []
        later: list[tuple[nn.Parameter, Tensor]] = []
        for weight, master in self._pairs:
            if weight.grad is not None:
                (first if master.grad is None else later).append((weight, master))
        for _, master in first:
            master.grad = torch.empty_like(master)
        for pairs, combine in ((first, torch._foreach_copy_), (later, torch._foreach_add_)):  # few launches for all
            if pairs:
                combine([master.grad for _, master in pairs], [weight.grad for weight, _ in pairs])  # type: ignore[misc]
            for weight, _ in pairs:
                weight.grad = None

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients down to `max_norm`; gives their norm before that."""
        if self.by_kernel and (found := self._gradients()):
            norms = torch._foreach_norm([gradient for *_, gradient in found], 2.0, dtype=torch.float32)
            norm = torch.linalg.vector_norm(torch.stack(norms))
            self._clip_factor = (max_norm / (norm + 1e-6)).clamp_(max=1.0)
            return norm
        self.accumulate_into_masters()
        norm = nn.utils.clip_grad_norm_(self.masters, max_norm, foreach=True)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def configure(self, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
        """Other constants from the next step on; vectors (norms, biases) are never decayed."""
        for group in self.adamw.param_groups:
            decay = weight_decay if group["params"][0].dim() >= 2 else 0.0
            group.update(betas=betas, eps=eps, weight_decay=decay)

    def step(self, learning_rate: float, finite: Tensor | None = None) -> None:
        """Update the weights and clear the gradients; skipped on the device if `finite` is false (GPU only)."""
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        if self.by_kernel and (found := self._gradients()):
            self._step_by_kernel(found, finite)
        else:
            self.accumulate_into_masters()
            if finite is not None:  # what the fused kernels look at to skip a step, without the host
                self.adamw.found_inf = (~finite).float()  # type: ignore[attr-defined]
            self.adamw.step()
            self.round_masters()
        self.clear()

    def _gradients(self) -> list[tuple[nn.Parameter, Tensor, Tensor]]:
        """(weight, master, gradient): of a single backward pass as it was computed, of several their sum."""
        if any(master.grad is not None for master in self.masters):
            self.accumulate_into_masters()
            return [(w, m, m.grad) for w, m in self._pairs if m.grad is not None]
        return [(w, m, w.grad.contiguous()) for w, m in self._pairs if w.grad is not None]

    @torch.no_grad()
    def _step_by_kernel(self, found: Sequence[tuple[nn.Parameter, Tensor, Tensor]], finite: Tensor | None) -> None:
        from palestra.learner.kernels import adamw

        weights, masters, gradients = zip(*found, strict=True)
        states = [self.adamw.state[master] or self._new_state(master) for master in masters]
        one = torch.ones((), device=masters[0].device)
        counted = one if finite is None else finite.float()
        # The steps of these states in one tensor, of which they hold parts: one launch counts them all.
        steps, parts = self._steps
        if len(parts) != len(states) or any(s["step"] is not part for s, part in zip(states, parts, strict=True)):
            steps = torch.stack([state["step"] for state in states])
            self._steps = steps, steps.unbind()
            for state, part in zip(states, self._steps[1], strict=True):
                state["step"] = part
        steps.add_(counted)
        group = self.adamw.param_groups[0]
        decay = {id(p): g["weight_decay"] for g in self.adamw.param_groups for p in g["params"]}
        adamw(
            masters,
            gradients,
            ([state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]),
            weights,
            steps,
            [decay[id(master)] for master in masters],
            factor=one if self._clip_factor is None else self._clip_factor,
            finite=counted.long(),
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
        )

    @torch.no_grad()
    def round_masters(self) -> None:
        """Give the model the master weights, rounded."""
        if self._pairs:
            torch._foreach_copy_([w for w, _ in self._pairs], [m for _, m in self._pairs])

    def clear(self) -> None:
        for weight in (*self.masters, *self.weights):
            weight.grad = None
        self._clip_factor = None

    def gradient_marks(self) -> list[tuple[int, int] | None]:
        """Another list after every gradient that a backward pass adds: shows whether a failed one has added some."""
        marks: list[tuple[int, int] | None] = []
        for weight in self.weights:
            gradient = weight.grad.to_local() if isinstance(weight.grad, DTensor) else weight.grad
            marks.append(None if gradient is None else (gradient.data_ptr(), gradient._version))
        return marks

    def discard_failed_backward(self) -> bool:
        """Discard the gradients of a failed backward pass; return False if earlier gradients are mixed with them."""
        if len(self._pairs) < len(self.weights):
            return False
        for weight in self.weights:
            weight.grad = None
        return True

    def zero_missing_gradients(self) -> None:
        """Set a gradient of 0 where none was computed, so that a step still applies the momentum."""
        self.accumulate_into_masters()
        for master in self.masters:
            if master.grad is None:
                master.grad = torch.zeros_like(master)

    def reset(self) -> None:
        """Reset moments, gradients and masters to the current weights."""
        self.clear()
        self.adamw.state.clear()
        with torch.no_grad():
            for weight, master in self._pairs:
                master.copy_(weight)

    def tensors(self) -> dict[str, Tensor]:
        """All that it keeps, by names that do not depend on the number of ranks; the tensors themselves."""
        state: dict[str, Tensor] = {}
        for name, master in zip(self.names, self.masters, strict=True):
            moments = self.adamw.state.get(master, {})
            state |= {f"{kind}/{name}": value for kind, value in ({"weight": master.detach()} | moments).items()}
        return state

    def init_moments(self) -> None:
        """Create moments of 0 for every weight, to be overwritten."""
        for master in self.masters:
            self._new_state(master)

    def _new_state(self, master: Tensor) -> dict[str, Tensor]:
        moments = {kind: torch.zeros_like(master.detach()) for kind in ("exp_avg", "exp_avg_sq")}
        state = {"step": torch.zeros((), device=master.device), **moments}
        self.adamw.state[master] = state
        return state

    def names_by_index(self) -> list[str]:
        """The weights as the state of AdamW numbers them."""
        names = {id(master): name for name, master in zip(self.names, self.masters, strict=True)}
        return [names[id(weight)] for group in self.adamw.param_groups for weight in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        return {"adamw": self.adamw.state_dict(), "masters": [master for _, master in self._pairs]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved: Sequence[Tensor] = state["masters"]
        if len(saved) != len(self._pairs):
            raise StateError(
                f"the checkpoint has {len(saved)} master weights, this run {len(self._pairs)}; "
                "set model.master_weights and model.dtype as they were"
            )
        self.adamw.load_state_dict(state["adamw"])
        with torch.no_grad():
            for (_, master), value in zip(self._pairs, saved, strict=True):
                master.copy_(value)


class UserOptimizer(Optimizer):
    """AdamW by the config until an optimizer is given, then that one."""

    _user: Any = None
    _scheduler: Any = None
    _watches = False

    def use(self, optimizer: Any | None, scheduler: Any | None) -> None:
        """Use this optimizer (or the scheduler's own) from now on, and step the scheduler after each training step."""
        if optimizer is None and scheduler is None:
            return
        if self._pairs:
            raise SettingError(
                "model.master_weights keeps its own copies of the weights, which another optimizer does not update; "
                "set it to false, or leave the optimizer out"
            )
        chosen = optimizer if optimizer is not None else getattr(scheduler, "optimizer", None)
        if chosen is None:
            raise SettingError("a scheduler without its optimizer cannot be used; give the optimizer too")
        if not self._shared_weights(chosen):
            raise SettingError("the optimizer holds no trainable weight of this model; build it from this model's")
        self._user, self._scheduler = chosen, scheduler

    def warn_of_other_optimizers(self) -> None:
        """Warn once if another optimizer of these weights steps without gradients, because this one has used them."""
        if self._watches:
            return
        self._watches = True
        this, warned = ref(self), False

        def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            nonlocal warned
            own = this()
            if warned or own is None or optimizer is own.adamw or optimizer is own._user:
                return
            shared = own._shared_weights(optimizer)
            if shared and all(weight.grad is None for weight in shared):
                warned = True
                log.warning(
                    "optimizer.step() has no effect: train_step has already made a step, with %s. "
                    "Pass your optimizer to it: train_step(prompt, answer, optimizer)",
                    "AdamW by the config" if own._user is None else "the optimizer passed to it last",
                )

        finalize(self, register_optimizer_step_pre_hook(before_step).remove)

    def _shared_weights(self, optimizer: Any) -> list[Tensor]:
        own = {id(weight) for weight in self.weights}
        return [p for group in optimizer.param_groups for p in group["params"] if id(p) in own]

    @property
    def supports_conditional_step(self) -> bool:
        return self._user is None and super().supports_conditional_step

    def step(self, learning_rate: float, finite: Tensor | None = None) -> None:
        if self._user is None:
            super().step(learning_rate, finite)
            return
        self._user.step()
        self.clear()

    def after_step(self) -> dict[str, float]:
        """Step the scheduler; returns the learning rate of the step if it is not the config's."""
        if self._user is None:
            return {}
        learning_rate = float(self._user.param_groups[0]["lr"])
        if self._scheduler is not None:
            self._scheduler.step()
        return {"learning_rate": learning_rate}
