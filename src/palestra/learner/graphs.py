"""The layers' forward and backward pass as CUDA graphs, for micro-batches so small that the host's launches are what
takes the time.

Micro-batches are padded to few shapes (`shapes`). One of a shape that was not met before is computed as any
other; when its shape comes again, its passes are captured, and replayed from then on.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from palestra.core.machine import capture, lacks_memory
from palestra.engine.recurrent import RecurrentLayers
from palestra.learner.self_check import has_dropout
from palestra.learner.tree_attention import Layout
from palestra.learner.tree_attention_cuda import HALF

log = logging.getLogger("palestra")
MOST = 12  # shapes of which graphs are kept: those met last
NOT_CAPTURED = ("num_experts", "num_local_experts", "n_routed_experts", "attn_logit_softcapping")

Pass = Callable[[Tensor, Tensor, Layout], Tensor]  # token ids, positions and layout -> hidden states [T, H]


def can_be_captured(model: Any) -> bool:
    """Whether all that layers do is decided by a micro-batch's shape, and done without the host.

    Attention within a window, or with more than a softmax, walks the trees; dropout draws other numbers each time.
    """
    config = model.config.get_text_config()
    return (
        model.device.type == "cuda"
        and not model.is_gradient_checkpointing
        and all(weight.dtype in HALF or "lora_" in name for name, weight in model.named_parameters())
        and not has_dropout(model)
        and not RecurrentLayers(model).modules
        and getattr(config, "sliding_window", None) is None
        and not any(name in vars(config) for name in NOT_CAPTURED)
    )


class Graphs:
    """Captured passes of one model, by the shape of the micro-batch."""

    def __init__(self, model: nn.Module, run: Pass) -> None:
        self._weights, self._run = list(model.parameters()), run  # to walk over all modules takes milliseconds
        self._seen: set[Any] = set()
        self._captured: OrderedDict[Any, Captured] = OrderedDict()
        self._gradients: list[Tensor] = []  # of all graphs, one for each trained weight
        self._pool: Any = None
        self._addresses: list[int] = []
        self.is_off = False  # for good, once a capture failed or its memory was needed
        # Whether micro-batches are padded. Without memory for graphs they still are: how much of it other processes
        # use should not decide how numbers round.
        self.pads = True

    @property
    def captured(self) -> int:
        """How many shapes have graphs."""
        return len(self._captured)

    def hidden(self, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """What `run` gives, with its gradient. It must be read before the next call, which overwrites it."""
        is_new = layout.bounds.shape not in self._seen
        self._seen.add(layout.bounds.shape)
        captured = None if is_new else self._captured_pass(ids, positions, layout)
        if captured is None:
            return self._run(ids, positions, layout)
        captured.load(ids, positions, layout)
        result: Tensor = _Replay.apply(captured.anchor, captured)
        return result

    def forget(self) -> None:
        """Give their memory back, and capture no more."""
        self._captured.clear()
        self._gradients, self._pool, self.is_off = [], None, True

    def _captured_pass(self, ids: Tensor, positions: Tensor, layout: Layout) -> Captured | None:
        shape = layout.bounds.shape
        if self._captured and self._addresses != self._weights_at():  # graphs read weights where they were
            self._captured.clear()
            self._pool = None
        if self.is_off:
            return None
        if shape in self._captured:
            self._captured.move_to_end(shape)
            return self._captured[shape]
        try:
            self._captured[shape] = self._capture(ids, positions, layout)
        except RuntimeError as error:  # out of memory, or what cannot be captured
            log.info("CUDA graph capture failed (%s); the learner runs small passes without graphs", error)
            self.forget()
            self.pads = lacks_memory(error)
            return None
        if len(self._captured) > MOST:
            self._captured.popitem(last=False)
        return self._captured[shape]

    def _capture(self, ids: Tensor, positions: Tensor, layout: Layout) -> Captured:
        trained = [weight for weight in self._weights if weight.requires_grad]
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._gradients = [torch.zeros_like(weight) for weight in trained]
            self._addresses = self._weights_at()
        return Captured(self._run, ids, positions, layout, trained, self._gradients, self._pool)

    def _weights_at(self) -> list[int]:
        return [weight.data_ptr() for weight in self._weights]


class Captured:
    """One forward and backward pass over tensors that stay where they are."""

    def __init__(
        self,
        run: Pass,
        ids: Tensor,
        positions: Tensor,
        layout: Layout,
        trained: Sequence[nn.Parameter],
        gradients: list[Tensor],
        pool: Any,
    ) -> None:
        self._ids, self._positions, self._layout = ids.clone(), positions.clone(), layout.copy()
        self._trained, self._gradients = trained, gradients
        self.anchor = torch.zeros((), device=ids.device, requires_grad=True)  # else autograd would leave the pass out
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with capture(self._forward, pool):
            hidden = run(self._ids, self._positions, self._layout)
        self._gradient = torch.empty_like(hidden)
        with capture(self._backward, pool):
            found = torch.autograd.grad(hidden, trained, self._gradient, allow_unused=True)
            pairs = [pair for pair in zip(gradients, found, strict=True) if pair[1] is not None]
            torch._foreach_copy_([own for own, _ in pairs], [new for _, new in pairs])
        self._used = [new is not None for new in found]
        self.hidden = hidden.detach()

    def load(self, ids: Tensor, positions: Tensor, layout: Layout) -> None:
        """Make this the micro-batch of the next replay."""
        targets = [self._ids, self._positions, *self._layout.bounds.numbers]
        torch._foreach_copy_(targets, [ids, positions, *layout.bounds.numbers])

    def replay_forward(self) -> Tensor:
        self._forward.replay()
        return self.hidden

    def replay_backward(self, gradient: Tensor) -> None:
        """Adds to the gradients of the weights."""
        for weight, own in zip(self._trained, self._gradients, strict=True):
            if weight.grad is own:  # of an earlier replay, which this one overwrites
                weight.grad = own.clone()
        self._gradient.copy_(gradient)
        self._backward.replay()
        sums: list[Tensor] = []
        added: list[Tensor] = []
        for weight, own, used in zip(self._trained, self._gradients, self._used, strict=True):
            if used and weight.grad is None:
                weight.grad = own
            elif used:
                sums.append(weight.grad)  # type: ignore[arg-type]
                added.append(own)
        if sums:
            torch._foreach_add_(sums, added)


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, captured: Captured) -> Tensor:
        ctx.captured = captured
        return captured.replay_forward().detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        ctx.captured.replay_backward(gradients[0])
        return None, None
