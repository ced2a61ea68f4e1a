"""One attention function for every model family; the step's plan says where the KV is.

Models reach it through transformers' AttentionInterface; `model(..., plan=plan)` hands the plan to
each layer. `AttentionSwitch` turns it on for the length of one forward, so that the same module can
train with another function.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from palestra.core.errors import UnsupportedModel

ENGINE_ATTENTION = "palestra_engine"
REMEDY = "sample with engine=plain"
CHUNKED = "chunked_attention"  # a layer type of transformers


class KVLayout(NamedTuple):
    """How the KV of a model with unlike layers is stored: with the heads and widths of the largest one."""

    layers: Mapping[int, int]  # the model's layers that attend -> their place
    heads: int
    key_dim: int
    value_dim: int

    def fit(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Widen heads with zeros and repeat key-value heads: attention gives the same, followed by zeros."""
        repeats = self.heads // k.shape[1]
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        q, k = (F.pad(x, (0, self.key_dim - x.shape[-1])) for x in (q, k))
        return q, k, F.pad(v, (0, self.value_dim - v.shape[-1]))


class ScoreRule(NamedTuple):
    """How a layer of attention scores keys, and which of them a token sees."""

    scale: float
    window: int | None = None  # how many of the newest keys; None: all
    softcap: float | None = None
    sinks: Tensor | None = None  # [H] the scores of a key without a value, which every token sees


class AttentionPlan:
    """Where a step's KV goes and comes from. `layout` is None if all layers of the model attend alike."""

    layout: KVLayout | None = None

    def kv_layer(self, module: nn.Module) -> int:
        layer: int = module.layer_idx  # type: ignore[assignment]
        return layer if self.layout is None else self.layout.layers[layer]

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
        """q [1, H, N, D], k and v [1, KV, N, D] of the step's N tokens -> [1, N, H, D]."""
        raise NotImplementedError


def engine_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    plan: AttentionPlan | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in every attention layer."""
    if plan is None:
        raise UnsupportedModel(f"{type(module).__name__} hands no keywords to its attention function; {REMEDY}")
    scale, width = query.shape[-1] ** -0.5 if scaling is None else scaling, value.shape[-1]
    if scales_queries(module, query.shape[2]):  # by the place among the step's tokens; within our context all are 1
        factors = query_scales(module, torch.arange(query.shape[2], device=query.device))
        query = (query / factors).to(query.dtype)
    rule = ScoreRule(scale, sliding_window, softcap, s_aux)
    if plan.layout is not None:
        query, key, value = plan.layout.fit(query, key, value)
    return plan.attend(module, query, key, value, rule)[..., :width], None


def scales_queries(module: Any, tokens: int) -> bool:
    """Whether the layer multiplies some of `tokens` queries by a factor that grows with their place (Llama 4)."""
    is_tuned = getattr(module, "attn_temperature_tuning", False) and not module.use_rope
    return is_tuned and tokens >= module.floor_scale


def query_scales(module: Any, positions: Tensor) -> Tensor:
    """[T, 1] the factors that such a layer gives to queries at these places."""
    steps = torch.floor((positions.float() + 1.0) / module.floor_scale)
    return (torch.log1p(steps) * module.attn_scale + 1.0)[:, None]


def attention_chunk(module: Any) -> int | None:
    """The length of the chunks into which the layer divides a sequence, without attention between them; None: one.

    Models without chunks are not asked for the layer's number: compiled layers would be compiled for each number.
    """
    config = getattr(module, "config", None)
    size: int | None = getattr(config, "attention_chunk_size", None)
    return size if size is not None and config.layer_types[module.layer_idx] == CHUNKED else None  # type: ignore[union-attr]


def unchunked_context(config: Any) -> int | None:
    """The longest sequence that is one chunk, with queries that are not scaled; None for models without chunks."""
    if CHUNKED not in (getattr(config, "layer_types", None) or ()):
        return None
    limits = [config.attention_chunk_size]
    if getattr(config, "attn_temperature_tuning", False):
        limits.append(int(config.floor_scale) - 1)
    return min(limits)


class ModulePatches(ExitStack):
    """Attributes of modules and configs that are set for a while; leaving the block restores them, the last one first.

    Module attributes are set in `__dict__`, past nn.Module's slow `__setattr__`.
    """

    def set(self, owner: Any, name: str, value: Any) -> None:
        if not isinstance(owner, nn.Module):
            self.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
            return
        own = owner.__dict__
        if name in own:
            self.callback(own.__setitem__, name, own[name])
        else:
            self.callback(own.pop, name, None)
        own[name] = value

    def set_training(self, model: nn.Module, training: bool) -> None:
        if model.training == training:  # walking over all modules takes milliseconds
            return
        for module in model.modules():
            if module.training != training:
                self.set(module, "training", training)


class AttentionSwitch:
    """Runs a model with another attention function, in evaluation or training mode, and puts both back.

    It writes the few fields that matter directly, since a decode step lasts only milliseconds.
    """

    def __init__(self, model: nn.Module) -> None:
        configs: list[Any] = []
        for module in model.modules():
            config = getattr(module, "config", None)
            if hasattr(config, "_attn_implementation_internal") and not any(config is c for c in configs):
                configs.append(config)
        self._configs = configs
        self._modules = list(model.modules())

    @contextmanager
    def use(self, name: str, training: bool) -> Iterator[None]:
        before = [config._attn_implementation_internal for config in self._configs]
        modes = [module.training for module in self._modules]
        for config in self._configs:
            config._attn_implementation_internal = name
        for module in self._modules:
            module.__dict__["training"] = training
        try:
            yield
        finally:
            for config, value in zip(self._configs, before, strict=True):
                config._attn_implementation_internal = value
            for module, mode in zip(self._modules, modes, strict=True):
                module.__dict__["training"] = mode


@torch.inference_mode()
def plain_forward(model: Any, input_ids: Tensor, **options: Any) -> Any:
    """The output of the model's own forward in evaluation mode, with its own attention function, for ids [1, T].

    Scoring and the self-check use it; the engine samples by other means.
    """
    with AttentionSwitch(model).use(model.config._attn_implementation or "sdpa", training=False):
        return model(input_ids=input_ids, **options)


def attend_part(
    q: Tensor,  # [B, H, Q, D]
    k: Tensor,  # [B, H, L, D]
    v: Tensor,
    bias: Tensor | None,  # added to the scores, [B or 1, 1, Q or 1, L]
    rule: ScoreRule,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention over a part of the keys [B, H, Q, D], and its log-sum-exp [B, H, Q], by which parts are merged.

    `causal` is for as many queries as keys, without `bias`.
    """
    if rule.softcap is None and k.shape[-1] == v.shape[-1]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=bias, scale=rule.scale
        )
    scores = torch.matmul(q * rule.scale, k.transpose(-1, -2))
    if rule.softcap is not None:
        scores = scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
    if causal:
        scores.masked_fill_(torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1), masked_score(scores.dtype))
    elif bias is not None:
        scores += bias
    total = scores.logsumexp(-1)
    return torch.matmul(scores.sub_(total[..., None]).exp_(), v), total


def merge_parts(a: Tensor, a_total: Tensor, b: Tensor, b_total: Tensor) -> Tensor:
    """Attention over two disjoint parts of the keys out of the attention over each."""
    return torch.lerp(a, b, (b_total - a_total).sigmoid_()[..., None].to(a.dtype))


def with_sinks(out: Tensor, total: Tensor, sinks: Tensor) -> Tensor:
    """Attention [..., D] with the log-sum-exp `total` [...] of its scores, after scores of a key without a value."""
    return out * (total - sinks).sigmoid_()[..., None].to(out.dtype)


def masked_score(dtype: torch.dtype) -> float:
    """The score of a masked key. Finite, so that a part whose keys are all masked merges with weight 0, not as NaN."""
    return torch.finfo(dtype).min / 2
