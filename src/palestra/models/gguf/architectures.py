"""The table of architectures that reading and writing share, and each one's tensor names and weight layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from palestra.core.errors import PalestraError
from palestra.models.gguf.file import GgufFile


class ConfigKey(NamedTuple):
    """A number in transformers' config and the GGUF key that holds it."""

    name: str
    key: str  # without the architecture's name in front
    type: type[int] | type[float]
    default: float | None = None  # llama.cpp's, for files without the key

    @property
    def least(self) -> int:
        return 1 if self.type is int else 0


REQUIRED_FIELDS = (
    ConfigKey("num_hidden_layers", "block_count", int),
    ConfigKey("hidden_size", "embedding_length", int),
    ConfigKey("intermediate_size", "feed_forward_length", int),
    ConfigKey("num_attention_heads", "attention.head_count", int),
    ConfigKey("max_position_embeddings", "context_length", int),
    ConfigKey("rms_norm_eps", "attention.layer_norm_rms_epsilon", float),
)
OPTIONAL_FIELDS = (
    ConfigKey("num_key_value_heads", "attention.head_count_kv", int),
    ConfigKey("head_dim", "attention.key_length", int),
)


@dataclass(frozen=True)
class Architecture:
    """One architecture of llama.cpp, and what differs there from transformers."""

    name: str  # GGUF's general.architecture
    model_type: str  # transformers' config.model_type
    permutes_qk: bool = False  # llama.cpp rotates neighbouring pairs of a head, transformers its two halves
    norm_offset: int = 0  # GGUF stores norm weights with this added: Gemma's norms scale by 1 + weight
    always_tied: bool = False  # GGUF has no output layer of its own for it
    optional_bias: bool = False  # config.attention_bias says whether q, k and v have biases
    fields: tuple[ConfigKey, ...] = ()  # beside those that all have
    # Sliding windows, where llama.cpp supports them: the defaults for files that do not say.
    window: int = 0
    full_attention_period: int = 0  # every n-th layer has full attention
    local_rope_theta: float = 0.0  # RoPE base of the layers with a window, where they have their own
    # With this many layers (the 27B model), attention scores are scaled by hidden_size / heads, not by head_dim.
    layers_scaled_by_width: int = 0


def _softcaps(attention: float | None, final: float | None) -> tuple[ConfigKey, ...]:
    return (
        ConfigKey("attn_logit_softcapping", "attn_logit_softcapping", float, attention),
        ConfigKey("final_logit_softcapping", "final_logit_softcapping", float, final),
    )


# Where two rows share a GGUF name, a file is read as the first of them.
ARCHITECTURES = (
    Architecture("llama", "llama", permutes_qk=True, optional_bias=True),
    Architecture("llama", "mistral", permutes_qk=True),
    Architecture("qwen2", "qwen2"),
    Architecture("qwen3", "qwen3", optional_bias=True),
    Architecture("gemma", "gemma", norm_offset=1, always_tied=True),
    Architecture(
        "gemma2",
        "gemma2",
        norm_offset=1,
        always_tied=True,
        fields=_softcaps(50.0, 30.0),
        window=4096,
        full_attention_period=2,
        layers_scaled_by_width=46,
    ),
    Architecture(
        "gemma3",
        "gemma3_text",
        norm_offset=1,
        fields=_softcaps(None, None),
        window=1024,
        full_attention_period=6,
        local_rope_theta=10_000.0,
        layers_scaled_by_width=62,
    ),
    Architecture("phi3", "phi3"),
)


def architecture_of(config: Any) -> Architecture:
    """The row of a transformers config; raises for one that cannot be written as GGUF."""
    for row in ARCHITECTURES:
        if row.model_type == config.model_type:
            if row.always_tied and not config.tie_word_embeddings:
                raise PalestraError(f"{config.model_type} with an output layer of its own cannot be written as GGUF")
            return row
    raise PalestraError(
        f"the architecture {config.model_type!r} cannot be written as GGUF; supported are "
        f"{', '.join(row.model_type for row in ARCHITECTURES)}. Use --to hf and llama.cpp's own converter"
    )


def architecture_of_file(file: GgufFile) -> Architecture:
    """The row of a GGUF file; raises for one that cannot be loaded."""
    experts = " with experts" if file.field("expert_count") else ""
    for row in ARCHITECTURES:
        if row.name == file.architecture and not experts:
            return row
    names = dict.fromkeys(row.name for row in ARCHITECTURES)
    raise PalestraError(
        f"{file.path} has the architecture {file.architecture or '(none)'}{experts}, which cannot be loaded from GGUF; "
        f"supported are {', '.join(names)}. Give the model's Hugging Face folder instead."
    )


def tensor_names(architecture: Architecture, layers: int) -> Callable[[str], str | None]:
    """A function from transformers' name of a weight to GGUF's; None for weights that GGUF does not have."""
    import gguf

    key = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(key, layers)
    return lambda name: names.get_name(name, try_suffixes=(".weight", ".bias"))


def weight_to_gguf(architecture: Architecture, config: Any, name: str, weight: torch.Tensor) -> torch.Tensor:
    """The weight of that (transformers) name as GGUF stores it."""
    if heads := _permuted_heads(architecture, config, name):
        return permute_qk(weight, heads)
    return weight.float() + architecture.norm_offset if _has_offset(architecture, name) else weight


def weight_from_gguf(architecture: Architecture, config: Any, name: str, weight: torch.Tensor) -> torch.Tensor:
    """The inverse of `weight_to_gguf`."""
    if heads := _permuted_heads(architecture, config, name):
        return unpermute_qk(weight, heads)
    return weight - architecture.norm_offset if _has_offset(architecture, name) else weight


def permute_qk(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from transformers' order (half, pair) to llama.cpp's (pair, half)."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def unpermute_qk(weight: torch.Tensor, heads: int) -> torch.Tensor:
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def _permuted_heads(architecture: Architecture, config: Any, name: str) -> int:
    """The number of heads of a query or key projection that has to be permuted; 0 for other weights."""
    if not architecture.permutes_qk:
        return 0
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return int(heads.get(name.split(".")[-2], 0))


def _has_offset(architecture: Architecture, name: str) -> bool:
    return bool(architecture.norm_offset) and name.endswith("norm.weight")
