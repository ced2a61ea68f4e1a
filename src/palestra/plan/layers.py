"""The layers of a decoder by its config: which attend, which are recurrent, and how wide their MLPs are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_PER_TOKEN = ("num_experts_per_tok", "experts_per_token", "moe_topk")
_MAMBA_HEADS = ("mamba_num_heads", "mamba_n_heads")
_ATTENTION = ("full_attention", "sliding_attention", "attention", "hybrid")
_RECURRENT = ("linear_attention", "conv", "mamba", "hybrid")
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # of Nemotron's hybrid_override_pattern
_HALF, _FULL = 2, 4  # bytes: convolution windows, recurrent states


@dataclass(frozen=True, slots=True)
class Layers:
    """Sums over all layers."""

    attention: int  # layers that attend
    mixer_weights: int  # matrices of recurrent layers, and of gates of attention
    mixer_sides: int  # inputs and outputs of their linear layers, for adapters
    state_bytes: int  # recurrent state of a session
    active_width: float  # of the MLPs that a token goes through, as if gated
    stored_width: float  # of all MLPs
    linear_width: float  # of those that are linear layers, not stacked experts


def layers_of(config: Mapping[str, Any], count: int, hidden: int) -> Layers:
    kinds = _kinds(config, count)
    recurrent = sum(kind in _RECURRENT for kind in kinds)
    weights, sides, state = _mixer(config, hidden) if recurrent else (0, 0, 0)
    active, stored, linear = (sum(widths) for widths in zip(*_widths(config, kinds), strict=True))
    attention = sum(kind in _ATTENTION for kind in kinds)
    gates = attention * config["num_attention_heads"] * config["head_dim"] if _has_gated_attention(config) else 0
    weights, sides = recurrent * weights + gates * hidden, recurrent * sides + gates
    return Layers(attention, weights, sides, recurrent * state, active, stored, linear)


def _has_gated_attention(config: Mapping[str, Any]) -> bool:
    """Whether q_proj gives a gate for each number of the heads' outputs, too."""
    return str(config.get("model_type")).startswith(("qwen3_next", "qwen3_5"))


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    return next((int(config[name]) for name in names if config.get(name)), 0)


def _kinds(config: Mapping[str, Any], count: int) -> list[str]:
    """The kind of each layer, by whichever key the family has."""
    if pattern := config.get("hybrid_override_pattern"):
        return [_PATTERN[letter] for letter in pattern]
    if named := config.get("layer_types") or config.get("layers_block_type"):
        return list(named)
    if config.get("model_type") == "falcon_h1":
        return ["hybrid"] * count
    attending = config.get("attn_layer_indices") or config.get("full_attn_idxs")
    if interval := config.get("full_attention_interval"):
        attending = range(interval - 1, count, interval)
    if attending is None:
        return ["attention"] * count
    return ["attention" if layer in attending else "linear_attention" for layer in range(count)]


def _mixer(config: Mapping[str, Any], hidden: int) -> tuple[int, int, int]:
    """(weights, sides of its linear layers, bytes of its state) of one recurrent layer."""
    if heads := _first(config, _MAMBA_HEADS):
        inner = heads * _first(config, ("mamba_head_dim", "mamba_d_head"))
        size = _first(config, ("ssm_state_size", "mamba_d_state"))
        channels = inner + 2 * size * (_first(config, ("n_groups", "mamba_n_groups")) or 1)
        kernel = _first(config, ("conv_kernel", "mamba_d_conv")) or 4
        outputs, state = inner + channels + heads, inner * size * _FULL
    elif value_heads := _first(config, ("linear_num_value_heads",)):
        keys = _first(config, ("linear_num_key_heads",)) * config["linear_key_head_dim"]
        inner = value_heads * config["linear_value_head_dim"]
        channels, kernel = 2 * keys + inner, config.get("linear_conv_kernel_dim", 4)
        outputs, state = 2 * keys + 2 * inner + 2 * value_heads, inner * config["linear_key_head_dim"] * _FULL
    else:  # a short convolution
        inner = channels = hidden
        kernel = config.get("conv_L_cache", 3)
        outputs, state = 3 * hidden, 0
    weights = hidden * outputs + inner * hidden + channels * kernel
    return weights, 2 * hidden + outputs + inner, state + channels * kernel * _HALF


def _widths(config: Mapping[str, Any], kinds: list[str]) -> list[tuple[float, float, float]]:
    """(active, stored, linear) width of each layer's MLP; two matrices instead of three count two thirds."""
    gated = 2 / 3 if config.get("mlp_hidden_act") == "relu2" else 1.0
    dense = _adjusted(config) if config.get("block_auto_adjust_ff_dim") else config["intermediate_size"]
    each = dense if isinstance(dense, list) else [dense] * len(kinds)
    experts = _first(config, _EXPERTS)
    width = config.get("moe_intermediate_size") or each[-1]
    shared = _shared(config, width)
    first_dense = _first(config, ("first_k_dense_replace", "num_dense_layers"))
    alone = any(kind in ("mlp", "moe") for kind in kinds)  # an MLP is a layer of its own
    widths = []
    for layer, kind in enumerate(kinds):
        if alone and kind not in ("mlp", "moe"):
            widths.append((0.0, 0.0, 0.0))
        elif kind == "mlp" or not experts or layer < first_dense:
            own = shared if config.get("shared_intermediate_size") and not experts else each[layer]
            widths.append((own * gated, own * gated, own * gated))
        else:
            chosen = _first(config, _PER_TOKEN) or 1
            widths.append(((chosen * width + shared) * gated, (experts * width + shared) * gated, shared * gated))
    return widths


def _adjusted(config: Mapping[str, Any]) -> int:
    """LFM2's width: two thirds of what its config says, in whole blocks."""
    width = 2 * int(config.get("block_ff_dim") or config["intermediate_size"]) // 3
    width = int(width * (config.get("block_ffn_dim_multiplier") or 1.0))
    block = int(config.get("block_multiple_of", 256))
    return -(-width // block) * block


def _shared(config: Mapping[str, Any], width: int) -> int:
    """The width of experts that every token goes through."""
    own = _first(config, ("shared_expert_intermediate_size", "shared_intermediate_size"))
    number = _first(config, ("n_shared_experts",))
    return own or number * (config.get("moe_shared_expert_intermediate_size") or width)
