"""LoRA on the stacked experts of a mixture: low-rank products for the tokens of each expert.

peft adds the adapters of all experts to their weights in each pass. That reads and writes all experts for a few tokens,
takes memory for a copy of them, and rounds small changes of a weight away. Here tokens are sorted by expert, and the
products with the weights and with the adapter are added in float32. Adapters are stored, loaded and merged by peft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from palestra.engine.supported import LowRank

IMPLEMENTATIONS = ("grouped_mm", "batched_mm")  # of transformers' experts; another one was chosen on purpose
ALIGNED_BYTES = 16  # grouped products want rows of a multiple of it


class SortedRows(NamedTuple):
    """A row for each chosen expert of each token, sorted by expert."""

    expert: Tensor  # [N]
    order: Tensor  # [N] the place of each row among (token, choice)
    ends: Tensor  # [experts] int32: where the rows of each expert end

    @classmethod
    def of(cls, chosen: Tensor, experts: int) -> SortedRows:
        expert, order = chosen.reshape(-1).sort()
        numbers = torch.arange(experts, device=chosen.device, dtype=expert.dtype)
        return cls(expert, order, torch.searchsorted(expert, numbers, right=True, out_int32=True))


def adapted_experts(
    experts: Any, adapters: Mapping[str, LowRank], hidden: Tensor, chosen: Tensor, weights: Tensor
) -> Tensor:
    """Output [T, H] of a module of experts with adapters, of hidden [T, H], chosen experts and their weights [T, k].

    An adapter of a stack of weights has one more dimension, the first one, of the experts.
    """
    rows = SortedRows.of(chosen, experts.num_experts)
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    activate = experts._apply_gate if experts.has_gate else experts.act_fn

    def inner(*summands: Tensor) -> Tensor:
        out: Tensor = activate(_sum(summands)).to(hidden.dtype)
        return out

    def combine(weights: Tensor, *summands: Tensor) -> Tensor:
        weighted = _sum(summands) * weights.reshape(-1)[rows.order].unsqueeze(-1)
        back = torch.empty_like(rows.order).scatter_(0, rows.order, torch.arange(len(rows.order), device=hidden.device))
        return weighted[back].view(*chosen.shape, -1).sum(1).to(hidden.dtype)

    tokens = hidden[rows.order // chosen.shape[-1]]
    middle = _recomputed(inner, *_summands(experts, name, adapters.get(name), tokens, rows))
    return _recomputed(combine, weights, *_summands(experts, "down_proj", adapters.get("down_proj"), middle, rows))


def _summands(experts: Any, name: str, adapter: LowRank | None, x: Tensor, rows: SortedRows) -> list[Tensor]:
    """The products [N, out] of x [N, in] with the weights and with the adapter, and the bias."""
    from transformers.integrations.moe import _grouped_mm

    weight = getattr(experts, name)
    found: list[Tensor] = [_grouped_mm(x, weight if experts.is_transposed else weight.transpose(1, 2), rows.ends)]
    if adapter is not None:
        low = _grouped_mm(x, adapter.down.transpose(1, 2), rows.ends) * adapter.scaling
        found.append(_grouped_mm(low, adapter.up.transpose(1, 2), rows.ends))
    if experts.has_bias:
        found.append(getattr(experts, f"{name}_bias")[rows.expert])
    return found


def _sum(summands: Sequence[Tensor]) -> Tensor:
    """In float32, so that a small summand is not rounded away next to a large one."""
    first, *others = summands
    total = first.to(torch.promote_types(first.dtype, torch.float32))
    for other in others:
        total = total + other
    return total


def _recomputed(work: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """work(*tensors); the backward pass computes its float32 tensors again instead of keeping them."""
    if not torch.is_grad_enabled() or all(x.dtype.itemsize > 2 for x in tensors):
        return work(*tensors)
    out: Tensor = checkpoint(work, *tensors, use_reentrant=False, preserve_rng_state=False)
    return out


def use_low_rank_products(model: nn.Module) -> None:
    """Let adapters on stacked experts compute by `adapted_experts` wherever that gives peft's result."""
    from peft.tuners.lora.layer import ParamWrapper

    wrappers: list[Any] = [module for module in model.modules() if type(module) is ParamWrapper]
    for wrapper in wrappers:
        if hasattr(wrapper.get_base_layer(), "is_transposed"):  # transformers' grouped products know its layout
            wrapper.__class__ = _low_rank_wrapper()


@cache
def _low_rank_wrapper() -> type[nn.Module]:
    from peft.tuners.lora import layer

    class ParamWrapper(layer.ParamWrapper):  # peft knows its wrappers by this name
        @torch.compiler.disable  # compiled layers are interrupted here, as they are by peft's own code
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            experts = self.get_base_layer()
            if len(args) != 2 or kwargs or not all(map(_is_ordinary, _wrappers(self))):
                return super().forward(x, *args, **kwargs)
            adapters = {w.parameter_name: _adapter_of(w, x.dtype) for w in _wrappers(self)}
            return adapted_experts(experts, adapters, x, *args)

    ParamWrapper.__qualname__ = "ParamWrapper"  # pickle finds it by this name, see __getattr__
    return ParamWrapper


def _wrappers(module: Any) -> Iterator[Any]:
    """A wrapper and those inside of it; each adapts one stack of weights."""
    while hasattr(module, "parameter_name"):
        yield module
        module = module.base_layer


def _is_ordinary(wrapper: Any) -> bool:
    """One adapter, that is neither disabled nor merged, on experts that compute by grouped or batched products."""
    experts, active = wrapper.get_base_layer(), wrapper.active_adapters
    if wrapper.disable_adapters or wrapper.merged or len(active) != 1 or active[0] not in wrapper.lora_A:
        return False
    return wrapper.num_experts > 1 and experts.config._experts_implementation in IMPLEMENTATIONS


def _adapter_of(wrapper: Any, dtype: torch.dtype) -> LowRank:
    [name] = wrapper.active_adapters
    down, up = wrapper.lora_A[name].weight.to(dtype), wrapper.lora_B[name].weight.to(dtype)
    down = down.unflatten(0, (wrapper.num_experts, -1))  # [experts * r, in]
    up = up.unflatten(1, (-1, wrapper.num_experts)).permute(2, 0, 1).contiguous()  # [out, r * experts]
    if missing := -down.shape[1] % (ALIGNED_BYTES // dtype.itemsize):
        down, up = F.pad(down, (0, 0, 0, missing)), F.pad(up, (0, missing))
    return LowRank(down, up, wrapper.scaling[name])


def __getattr__(name: str) -> Any:
    """The wrapper's class as an attribute of this module, so that `torch.save(model)` works; peft is loaded late."""
    if name == "ParamWrapper":
        return _low_rank_wrapper()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
