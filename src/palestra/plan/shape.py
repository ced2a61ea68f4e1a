"""The shape of a decoder: all that its cost depends on, from a config of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from palestra.core.errors import PalestraError, UnreadableFileError, UnsupportedError

_KEYS = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "feed_forward": "intermediate_size",
    "vocabulary": "vocab_size",
}
_UNKNOWN = ("llama4_text", "gemma3n_text", "gemma4_text")  # experts in some layers; embeddings of each layer
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_PER_TOKEN = ("num_experts_per_tok", "experts_per_token", "moe_topk")
_MAMBA_HEADS = ("mamba_num_heads", "mamba_n_heads")
_ATTENTION = ("full_attention", "sliding_attention", "attention", "hybrid")
_RECURRENT = ("linear_attention", "conv", "mamba", "hybrid")
_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # of Nemotron's hybrid_override_pattern
_HALF, _FULL = 2, 4  # bytes: convolution windows, recurrent states
_CHUNK = 64  # tokens of a recurrent layer's chunk


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder: attention with grouped heads, a gated MLP, an output head that may be the embedding.

    In a mixture of experts `feed_forward` is the width that a token goes through, and `stored_feed_forward` that of all
    experts. Of a hybrid model some layers attend, and the others have a recurrent state. Both are means over layers.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocabulary: int
    tied: bool  # the output head is the embedding
    context: int | None = None
    attention_layers: int | None = None  # None: all
    mixer_weights: int = 0  # of all recurrent layers
    mixer_sides: int = 0  # inputs and outputs of their linear layers
    state_bytes: int = 0  # recurrent state of a rollout
    mixer_bytes: int = 0  # what a recurrent layer computes in for each token, forward and backward
    stored_feed_forward: int | None = None  # None: a token goes through all
    linear_feed_forward: int | None = None  # what is no stacked expert; None: all
    experts_share: float = 1.0  # of the experts that one token goes through

    @property
    def attending(self) -> int:
        return self.layers if self.attention_layers is None else self.attention_layers

    def _layer_weights(self, feed_forward: int) -> int:
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        mixers = self.attending * attention + self.mixer_weights
        return mixers // self.layers + 3 * self.hidden * feed_forward

    @property
    def layer_weights(self) -> int:
        """Weights of one layer that a token goes through: q, k, v, o, gate, up, down."""
        return self._layer_weights(self.feed_forward)

    @property
    def stored_layer_weights(self) -> int:
        """The same with all experts."""
        return self._layer_weights(self.feed_forward if self.stored_feed_forward is None else self.stored_feed_forward)

    @property
    def linear_layer_weights(self) -> int:
        """The same without stacked experts, which are not quantised."""
        return self._layer_weights(self.feed_forward if self.linear_feed_forward is None else self.linear_feed_forward)

    def read_layer_weights(self, rows: int) -> float:
        """Number of weights of one layer that a decode step of `rows` reads; each row chooses its own experts."""
        experts = 3 * self.hidden * ((self.stored_feed_forward or 0) - (self.linear_feed_forward or 0))
        return self.stored_layer_weights - experts * (1 - self.experts_share) ** rows

    @property
    def head_weights(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        norms = (2 * self.layers + 1) * self.hidden
        return self.layers * self.stored_layer_weights + self.head_weights * (1 if self.tied else 2) + norms

    @property
    def layer_outputs(self) -> int:
        """Numbers of a token that a layer keeps: its input, and what its products (but the last) and attention give."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return 2 * queries + 2 * keys + 2 * self.feed_forward + 2 * self.hidden

    @property
    def linear_outputs(self) -> int:
        """Numbers that the linear layers of one layer give for a token."""
        return self.layer_outputs - self.heads * self.head_dim

    @property
    def kv_numbers(self) -> int:
        """Numbers in the KV cache for a token."""
        return 2 * self.attending * self.kv_heads * self.head_dim

    def adapter_weights(self, rank: int) -> int:
        """Weights of LoRA on all linear layers but the head."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        width = self.feed_forward if self.linear_feed_forward is None else self.linear_feed_forward
        attention = self.attending * (2 * (self.hidden + queries) + 2 * (self.hidden + keys))
        mlp = self.layers * 3 * (self.hidden + width) if width else 0
        return rank * (attention + self.mixer_sides + mlp)


def shape_from_config(config: Mapping[str, Any], name: str = "the config") -> ModelShape:
    """The shape in a transformers config, as a mapping."""
    config = config.get("text_config") or config
    model_type = str(config.get("model_type"))
    if model_type in _UNKNOWN or config.get("kv_lora_rank"):  # the latter: multi-head latent attention
        raise UnsupportedError(f"{name} is of the type {model_type}, whose layers the cost model does not know")
    if named := config.get("layers_block_type"):  # Nemotron's config object has no number
        config = {"num_hidden_layers": len(named), **config}
    if block := config.get("block_ff_dim"):
        config = {"intermediate_size": block, **config}
    missing = [key for key in _KEYS.values() if not isinstance(config.get(key), int)]
    if missing:
        raise UnreadableFileError(f"{name} has no {', '.join(missing)}; expected the config.json of a decoder")
    sizes = {field: int(config[key]) for field, key in _KEYS.items()}
    heads = sizes["heads"]
    shape = ModelShape(
        **sizes,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or sizes["hidden"] // heads,
        tied=bool(config.get("tie_word_embeddings", "gemma" in model_type)),
        context=config.get("max_position_embeddings"),
    )
    kinds = _kinds(config, shape.layers)
    attending = sum(kind in _ATTENTION for kind in kinds)
    shape = _with_mixers(shape, config, attending, sum(kind in _RECURRENT for kind in kinds))
    # sums over all layers: the widths that a token goes through, of all experts, and of what is no stacked expert
    active, stored, linear = (sum(widths) for widths in zip(*_widths(config, kinds), strict=True))
    if attending == shape.layers and active == shape.layers * shape.feed_forward == stored:
        return shape
    shape = replace(shape, feed_forward=round(active / shape.layers), attention_layers=attending)
    if stored == active:
        return shape
    stored_width, linear_width = round(stored / shape.layers), round(linear / shape.layers)
    share = (active - linear) / (stored - linear)
    return replace(shape, stored_feed_forward=stored_width, linear_feed_forward=linear_width, experts_share=share)


def shape_of(config: Any) -> ModelShape | None:
    """The shape of a transformers config object; None for what the cost model does not know."""
    try:
        return shape_from_config(config.to_dict())
    except (AttributeError, PalestraError):
        return None


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


def _with_mixers(shape: ModelShape, config: Mapping[str, Any], attending: int, recurrent: int) -> ModelShape:
    """The shape with the weights of recurrent layers and of gates of attention.

    What a recurrent layer computes in is that of our own code, by measurement; kernels of packages need less.
    """
    # in some families q_proj gives a gate for each number of the heads' outputs, too
    is_gated = str(config.get("model_type")).startswith(("qwen3_next", "qwen3_5"))
    gates = attending * config["num_attention_heads"] * config["head_dim"] if is_gated else 0
    hidden = shape.hidden
    if not recurrent:
        return replace(shape, mixer_weights=gates * hidden, mixer_sides=gates) if gates else shape
    if heads := _first(config, _MAMBA_HEADS):
        inner = heads * _first(config, ("mamba_head_dim", "mamba_d_head"))
        size = _first(config, ("ssm_state_size", "mamba_d_state"))
        channels = inner + 2 * size * (_first(config, ("n_groups", "mamba_n_groups")) or 1)
        kernel = _first(config, ("conv_kernel", "mamba_d_conv")) or 4
        outputs, state = inner + channels + heads, inner * size * _FULL
        inside = _FULL * (12 * inner + 5 * _CHUNK * heads) + 3 * state // _CHUNK
    elif value_heads := _first(config, ("linear_num_value_heads",)):
        keys = _first(config, ("linear_num_key_heads",)) * config["linear_key_head_dim"]
        inner = value_heads * config["linear_value_head_dim"]
        channels, kernel = 2 * keys + inner, config.get("linear_conv_kernel_dim", 4)
        outputs, state = 2 * keys + 2 * inner + 2 * value_heads, inner * config["linear_key_head_dim"] * _FULL
        repeated = value_heads * config["linear_key_head_dim"]
        inside = _FULL * (12 * (repeated + inner) + 24 * _CHUNK * value_heads) + 4 * state // _CHUNK
    else:  # a short convolution
        inner = channels = hidden
        kernel = config.get("conv_L_cache", 3)
        outputs, state, inside = 3 * hidden, 0, 0
    return replace(
        shape,
        mixer_weights=recurrent * (hidden * outputs + inner * hidden + channels * kernel) + gates * hidden,
        mixer_sides=recurrent * (2 * hidden + outputs + inner) + gates,
        state_bytes=recurrent * (state + channels * kernel * _HALF),
        mixer_bytes=inside + 6 * channels * _HALF,  # around the convolution
    )


def _widths(config: Mapping[str, Any], kinds: list[str]) -> list[tuple[float, float, float]]:
    """(active, stored, linear) width of each layer's MLP; two matrices instead of three count two thirds."""
    gated = 2 / 3 if config.get("mlp_hidden_act") == "relu2" else 1.0
    dense: Any = config["intermediate_size"]
    if config.get("block_auto_adjust_ff_dim"):  # LFM2: two thirds of what its config says, in whole blocks
        dense = 2 * int(config.get("block_ff_dim") or dense) // 3
        dense = int(dense * (config.get("block_ffn_dim_multiplier") or 1.0))
        block = int(config.get("block_multiple_of", 256))
        dense = -(-dense // block) * block
    each = dense if isinstance(dense, list) else [dense] * len(kinds)
    experts = _first(config, _EXPERTS)
    width = config.get("moe_intermediate_size") or each[-1]
    # of experts that every token goes through
    shared = _first(config, ("shared_expert_intermediate_size", "shared_intermediate_size")) or _first(
        config, ("n_shared_experts",)
    ) * (config.get("moe_shared_expert_intermediate_size") or width)
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
