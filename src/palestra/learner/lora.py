"""Low-rank adapters by peft, and 4-bit base weights (QLoRA) by bitsandbytes."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from palestra.core.config_sections import LoraSection
from palestra.core.errors import MissingPackageError, SettingError, UnsupportedError
from palestra.engine.supported import adapted_product
from palestra.learner.lora_experts import use_low_rank_products
from palestra.learner.tree_attention_cuda import HALF

if TYPE_CHECKING:
    from peft import LoraConfig


ALL_LINEAR = "all-linear"
EXPERTS = "experts"  # among lora.target_modules: the stacked weights of a mixture of experts


def build_peft_config(lora: LoraSection, model: nn.Module | None = None) -> LoraConfig:
    """peft's LoraConfig of a config section; all linear layers unless modules are named."""
    if lora.r < 1:
        raise SettingError(f"lora.r={lora.r} makes no adapter; use 1 or more")
    from peft import LoraConfig

    arguments = lora.peft_arguments()
    if model is not None:
        arguments |= _targets_in(model, lora.target_modules or [])
    return LoraConfig(**arguments)


def _targets_in(model: nn.Module, names: list[str]) -> dict[str, Any]:
    """Additional peft arguments for this model's modules."""
    found: dict[str, Any] = {}
    if EXPERTS in names:
        weights = [name.split(".") for name, p in model.named_parameters() if p.dim() == 3]  # [experts, ...]
        stacked = {f"{EXPERTS}.{name[-1]}" for name in weights if name[-2] == EXPERTS}
        if not stacked:
            raise SettingError(f"lora.target_modules names {EXPERTS!r}, and the model has no experts; leave it out")
        linear = [name for name in names if name not in (EXPERTS, ALL_LINEAR)]
        found["target_parameters"] = sorted(stacked)
        found["target_modules"] = ALL_LINEAR if ALL_LINEAR in names else linear
    elif ALL_LINEAR in names:
        found["target_modules"] = ALL_LINEAR
    if found.get("target_modules", None if names else ALL_LINEAR) == ALL_LINEAR:
        found["exclude_modules"] = _not_adapted(model) or None
    return found


def _not_adapted(model: nn.Module) -> list[str]:
    """Linear layers that have no adapter: routers of a class of their own, which give more than their product, and
    Mamba's output, whose weight its kernels read past the adapter (peft refuses it)."""
    routers = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and type(module).__module__.startswith("transformers.models.")
    }
    has_mamba = any(hasattr(module, "A_log") and hasattr(module, "D") for module in model.modules())
    return sorted(routers | ({"out_proj"} if has_mamba else set()))


def add_lora(model: Any, lora: LoraSection, *, in_model_dtype: bool | None = None) -> nn.Module:
    """The model with new adapters and its own weights frozen; float32 adapters on low-precision weights.

    With `in_model_dtype` (default: on a GPU), adapters of half-precision layers compute in the layer's dtype, as the
    sampler does, instead of turning its input and output into float32. Their weights stay in float32.
    Layers that are not in 4 bits (embedding, norms, head) keep the dtype that the 4-bit layers compute in. peft's own
    preparation makes them float32, and with them attention, KV cache and logits.
    """
    config = build_peft_config(lora, model)
    from peft import get_peft_model

    if lora.load_in_4bit and not getattr(model, "is_loaded_in_4bit", False):
        raise SettingError("lora.load_in_4bit needs a model loaded in 4 bits; pass quantization_config() to its loader")
    by_default = model.device.type == "cuda" and not getattr(model, "is_loaded_in_4bit", False)
    if (by_default if in_model_dtype is None else in_model_dtype) and model.dtype in HALF:
        config._register_custom_module({nn.Linear: _half_precision_linear()})
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        raise SettingError(f"lora.target_modules={lora.target_modules} cannot be adapted: {error}") from error
    use_low_rank_products(adapted)
    return adapted


@cache
def _half_precision_linear() -> type[nn.Module]:
    from peft.tuners.lora.layer import Linear

    class HalfPrecisionLinear(Linear):
        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.disable_adapters or self.merged or len(self.active_adapters) != 1:
                return super().forward(x, *args, **kwargs)
            [name] = self.active_adapters
            down, up = self.lora_A[name].weight.to(x.dtype), self.lora_B[name].weight.to(x.dtype)
            low = F.linear(self.lora_dropout[name](x), down) * self.scaling[name]
            base = self.base_layer
            if torch.compiler.is_compiling():  # the sum is not rounded before it is used
                return base(x) + F.linear(low, up)
            return _Adapted.apply(x, base.weight, base.bias, low, up)

    HalfPrecisionLinear.__qualname__ = "HalfPrecisionLinear"  # pickle finds it by this name, see __getattr__
    return HalfPrecisionLinear


class _Adapted(torch.autograd.Function):
    """A linear layer and its adapter, rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias, low, up)
        flat = adapted_product(x.flatten(0, -2), weight, bias, low.flatten(0, -2), up)
        return flat.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, low, up = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        return (
            (grads[0] @ weight),
            grad.T @ x.flatten(0, -2) if needs_weight else None,
            grad.sum(0) if needs_bias and bias is not None else None,
            grads[0] @ up,
            grad.T @ low.flatten(0, -2),
        )


def __getattr__(name: str) -> Any:
    """HalfPrecisionLinear as an attribute of this module, so that `torch.save(model)` works; peft is loaded late."""
    if name == "HalfPrecisionLinear":
        return _half_precision_linear()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def quantization_config(lora: LoraSection, dtype: torch.dtype = torch.bfloat16) -> Any | None:
    """transformers' 4-bit settings (nf4, double quantisation) for `from_pretrained`; None when not asked for.

    `dtype` is that of the model's other weights, in which the products are computed.
    """
    if not lora.load_in_4bit:
        return None
    if not torch.cuda.is_available():
        raise UnsupportedError("lora.load_in_4bit needs a CUDA GPU, and none is there; use lora.load_in_4bit=false")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingPackageError("lora.load_in_4bit needs bitsandbytes; pip install 'palestra[qlora]'")
    from transformers import BitsAndBytesConfig

    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype, **nf4)
