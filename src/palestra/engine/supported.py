"""Which models the engine can run, with which KV shape, and which of them the fast decoders know (LoRA included)."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.core.errors import ResourceError, UnsupportedModel
from palestra.engine.attention import (
    CHUNKED,
    ENGINE_ATTENTION,
    REMEDY,
    AttentionPlan,
    AttentionSwitch,
    KVLayout,
    ScoreRule,
    engine_attention,
)
from palestra.engine.recurrent import RecurrentLayers, StateShape, state_shape
from palestra.engine.routing import expert_count


class CacheTooLarge(ResourceError):
    """The GPU has no room for so much KV."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """The KV of one token: layers, heads, key and value width, dtype; and the recurrent state of a session, if any."""

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    layout: KVLayout | None = None  # of unlike layers
    states: StateShape = field(default_factory=dict)

    @property
    def bytes_per_token(self) -> int:
        return self.layers * self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

    def of_one_width(self) -> KVShape:
        """With keys and values of the same width, the larger one, as the GPU kernels store them."""
        width = max(self.key_dim, self.value_dim)
        if self.key_dim == self.value_dim:
            return self
        layout = self.layout or KVLayout({i: i for i in range(self.layers)}, self.heads, width, width)
        layout = layout._replace(key_dim=width, value_dim=width)
        return replace(self, key_dim=width, value_dim=width, layout=layout)


PEFT_LINEAR = ("peft.tuners.lora.layer", "Linear")


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter of one linear layer: it adds `scaling * up @ down @ x`."""

    down: Tensor  # [r, in]
    up: Tensor  # [out, r]
    scaling: float


def base_model(model: Any) -> Any:
    """The decoder inside of peft's wrapper; its linear layers are still the adapted ones."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder_of(model: Any) -> Any:
    """The model without its head; Llama 4's config names another prefix."""
    return model.base_model if model.base_model is not model else getattr(model, "model", model)


def decoder_layers(model: Any) -> list[nn.Module]:
    """All of one make, so that one compiled program serves them all."""
    stacks = [child for child in decoder_of(model).children() if isinstance(child, nn.ModuleList)]
    return max((list(stack) for stack in stacks), key=len, default=[])


def base_linear(linear: Any) -> Any:
    return getattr(linear, "base_layer", linear)


def is_linear(linear: Any) -> bool:
    """An nn.Linear, bare or with one ordinary LoRA adapter: not merged, not quantised, no variant such as DoRA."""
    if type(base_linear(linear)) is not nn.Linear:
        return False
    if linear is base_linear(linear):
        return True
    is_ordinary = any((t.__module__, t.__name__) == PEFT_LINEAR for t in type(linear).__mro__[:2])  # or the learner's
    if not is_ordinary or linear.merged or linear.disable_adapters or len(linear.active_adapters) != 1:
        return False
    name = linear.active_adapters[0]
    if name not in linear.lora_A:
        return False
    variant = getattr(linear, "lora_variant", {}).get(name) or getattr(linear, "use_dora", {}).get(name)
    return not variant and not linear.fan_in_fan_out and linear.lora_B[name].bias is None


def adapter_of(linear: Any) -> LowRank | None:
    if linear is base_linear(linear):
        return None
    name = linear.active_adapters[0]
    return LowRank(linear.lora_A[name].weight, linear.lora_B[name].weight, linear.scaling[name])


class FusedAdapter:
    """The adapters of linear layers with one input as two small products, in the dtype of the layers.

    Its buffers never move, because captured graphs read them: `refresh` copies the adapters' weights into them.
    """

    def __init__(self, linears: Sequence[Any]) -> None:
        self._adapters = [adapter_of(linear) for linear in linears]
        self._outputs = [base_linear(linear).out_features for linear in linears]
        ranks = sum(len(adapter.down) for adapter in self._adapters if adapter is not None)
        weight = base_linear(linears[0]).weight
        padded = -(-ranks // 8) * 8  # matrix products want rows of 16 bytes
        self.down = torch.zeros(padded, weight.shape[1], dtype=weight.dtype, device=weight.device)
        self.up = torch.zeros(sum(self._outputs), padded, dtype=weight.dtype, device=weight.device)
        self.refresh()

    @classmethod
    def of(cls, linears: Sequence[Any]) -> FusedAdapter | None:
        return cls(linears) if any(adapter_of(linear) is not None for linear in linears) else None

    @torch.no_grad()
    def refresh(self) -> None:
        row = rank = 0
        for adapter, outputs in zip(self._adapters, self._outputs, strict=True):
            if adapter is not None:
                r = len(adapter.down)
                self.down[rank : rank + r].copy_(adapter.down)
                self.up[row : row + outputs, rank : rank + r].copy_(adapter.up * adapter.scaling)
                rank += r
            row += outputs


def adapted_product(x: Tensor, weight: Tensor, bias: Tensor | None, low: Tensor, up: Tensor) -> Tensor:
    """x @ weight.T + low @ up.T + bias of [N, in] and [N, r], rounded once.

    The few bits of bfloat16 do not hold small changes: what an adapter adds to a rounded product is rounded away as
    long as it is smaller than half a step of these bits, each time.
    """
    if x.dtype == torch.float32:
        return F.linear(x, weight, bias).addmm_(low, up.T)
    if x.is_cuda:
        wide = torch.mm(low, up.T, out_dtype=torch.float32)
        torch.addmm(wide, x, weight.T, out_dtype=torch.float32, out=wide)
    else:
        wide = torch.addmm(low.float() @ up.float().T, x.float(), weight.float().T)
    if bias is not None:
        wide += bias
    return wide.to(x.dtype)


# Sequences of chunked layers end with the first chunk (`unchunked_context`). Hybrid is Mamba 2 next to attention.
ATTENTION_LAYERS = ("full_attention", "sliding_attention", CHUNKED, "hybrid")
STATELESS_LAYERS = ("mlp", "moe")


@dataclass(slots=True)
class ShapeProbe(AttentionPlan):
    """An attention plan that computes causal attention without a cache and notes the KV shape of each layer."""

    layers: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        layer: int = module.layer_idx  # type: ignore[assignment]
        self.layers[layer] = (k.shape[1], k.shape[3], v.shape[3])
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=rule.scale, enable_gqa=True).transpose(
            1, 2
        )


def text_config(model: nn.Module) -> Any:
    """The config of the language model inside, whatever wraps it."""
    return model.config.get_text_config(decoder=True)  # type: ignore[union-attr,operator]


def has_experts(config: Any) -> bool:
    return expert_count(config) > 0


def kv_shape(model: Any) -> KVShape:
    """Run two tokens through the model and read the shape of its KV; UnsupportedModel when it has another memory."""
    from transformers import AttentionInterface

    AttentionInterface.register(ENGINE_ATTENTION, engine_attention)  # transformers builds no mask for it
    config = text_config(model)
    name = config.model_type
    if not has_attention_interface(model):
        raise UnsupportedModel(f"{name} does not attend through transformers' attention interface; {REMEDY}")
    if not takes_keywords(base_model(model).base_model):
        raise UnsupportedModel(f"{name} hands no keywords to its attention layers; the paged engine needs it; {REMEDY}")
    recurrent = RecurrentLayers(model)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    attending = [layer for layer, kind in enumerate(kinds) if kind in ATTENTION_LAYERS]
    stateful = {kinds[module.layer_idx] for module in recurrent.modules}  # type: ignore[index]
    foreign = sorted({*kinds} - {*ATTENTION_LAYERS, *STATELESS_LAYERS} - stateful)
    if foreign or not attending:
        raise UnsupportedModel(
            f"{name} has layers of type {', '.join(foreign or stateful)} that the paged engine does not know, or no "
            f"attention; {REMEDY}"
        )
    states = state_shape(model, recurrent)
    probe = ShapeProbe()
    device = next(model.parameters()).device
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    with torch.inference_mode(), AttentionSwitch(model).use(ENGINE_ATTENTION, training=False):
        model(input_ids=ids, position_ids=torch.arange(2, device=device)[None], use_cache=False, plan=probe)
    if sorted(probe.layers) != attending:
        raise UnsupportedModel(
            f"{name} has {len(attending)} layers of attention and {len(probe.layers)} of them attend through "
            f"transformers' attention interface; the paged engine needs all; {REMEDY}"
        )
    shapes = set(probe.layers.values())
    heads, key_dim, value_dim = (max(sizes) for sizes in zip(*shapes, strict=True))
    if any(heads % shape[0] for shape in shapes):
        raise UnsupportedModel(f"{name} has layers of different KV shapes {sorted(shapes)}; {REMEDY}")
    layout = KVLayout({layer: i for i, layer in enumerate(attending)}, heads, key_dim, value_dim)
    alike = len(shapes) == 1 and len(attending) == len(kinds)
    return KVShape(len(attending), heads, key_dim, value_dim, model.dtype, None if alike else layout, states)


def has_attention_interface(model: nn.Module) -> bool:
    """Whether another attention function can be chosen; the code of older families has no such choice."""
    files = {type(module).__module__ for module in model.modules()}
    return any(hasattr(sys.modules[file], "ALL_ATTENTION_FUNCTIONS") for file in files)


def takes_keywords(decoder: Any) -> bool:
    """Whether keywords of the decoder's forward reach its layers."""
    parameters = inspect.signature(decoder.forward).parameters.values()
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)


LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
NO_EXACT = f"leave it out, or train one of {', '.join(LLAMA_LIKE)} on a CUDA GPU"
STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # others change with the length
CAPTURABLE_EXPERTS = ("grouped_mm", "batched_mm")


def is_llama_like(model: Any) -> bool:
    """A Hugging Face decoder of a known family, with ordinary linear layers (LoRA too) and norms, and no hooks."""
    config, model = text_config(model), base_model(model)
    own = type(model).__module__.startswith(f"transformers.models.{config.model_type}.")
    if config.model_type not in LLAMA_LIKE or not own or config.hidden_act not in ("silu", "swish"):
        return False
    if not has_static_rope(config):
        return False
    if len({(p.dtype, p.device) for name, p in model.named_parameters() if ".lora_" not in name}) > 1:
        return False
    norms = {type(m): m for m in model.modules() if type(m).__name__.endswith("RMSNorm")}
    if not all(is_standard_rms_norm(copy.deepcopy(norm).cpu().float()) for norm in norms.values()):
        return False
    return can_fuse(model)


def can_fuse(model: Any) -> bool:
    """No hooks, an ordinary embedding and linear layers (LoRA too), those of a group all with a bias or all without."""
    if any(m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ for m in model.modules()):
        return False
    if type(model.model.embed_tokens) is not nn.Embedding:
        return False
    return all(
        all(map(is_linear, group)) and len({base_linear(linear).bias is None for linear in group}) == 1
        for group in linear_groups(model)
    )


def can_capture(model: Any) -> bool:
    """Whether a forward never waits for the GPU. Experts called in turn do, grouped products of other dtypes than
    bfloat16 as well, and RoPE that changes with the length."""
    config = text_config(model)
    if has_experts(config):
        experts = getattr(config, "_experts_implementation", None)
        if experts not in CAPTURABLE_EXPERTS or (experts == "grouped_mm" and model.dtype != torch.bfloat16):
            return False
    return has_static_rope(config)


def has_static_rope(config: Any) -> bool:
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    return all(p.get("rope_type", "default") in STATIC_ROPE for p in by_layer_type)


def sliding_window(attention: Any) -> int | None:
    """How far back a layer of attention sees; None: to the beginning."""
    own, config = attention.__dict__, attention.config
    if "sliding_window" in own or config.model_type != "mistral":  # the others ignore what their config says
        return own.get("sliding_window")
    return config.sliding_window


def norm_epsilon(module: nn.Module) -> float | None:
    """The epsilon of a norm with a weight vector; None when it is something else."""
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = getattr(module, "weight", None)
    return epsilon if isinstance(weight, Tensor) and weight.dim() == 1 and isinstance(epsilon, float) else None


@torch.no_grad()
def is_standard_rms_norm(module: nn.Module) -> bool:
    """Whether the norm gives torch's numbers (some families scale by 1 + weight)."""
    weight: Tensor = module.weight  # type: ignore[assignment]
    if weight.dtype != torch.float32:
        return False  # half precision rounds in another order
    x = torch.randn(3, weight.shape[0], generator=torch.Generator().manual_seed(0))
    expected = F.rms_norm(x, weight.shape, weight, norm_epsilon(module))
    return torch.allclose(module(x), expected, rtol=1e-5, atol=1e-6)


def linear_groups(model: Any) -> list[list[Any]]:
    """The linear layers outside of recurrent layers; those of a group have one input and may run as one product."""
    groups = [[model.lm_head]]
    for layer in model.model.layers:
        if attention := getattr(layer, "self_attn", None):
            groups += [[attention.q_proj, attention.k_proj, attention.v_proj], [attention.o_proj]]
        groups += [[layer.mlp.gate_proj, layer.mlp.up_proj], [layer.mlp.down_proj]]
    return groups
