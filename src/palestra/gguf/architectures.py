"""What llama.cpp wants to know of each architecture, and how it wants its weights."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from palestra.core.errors import PalestraError

log = logging.getLogger("palestra")

Field = str | int | float | bool


@dataclass(frozen=True)
class Architecture:
    """One architecture of llama.cpp and where it parts from transformers."""

    name: str
    permutes_rotary: bool = False  # llama.cpp's `llama` turns neighbouring pairs, transformers the two halves
    shifts_norms: bool = False  # Gemma's norms multiply by 1 + weight
    windows: bool = False  # llama.cpp knows its sliding windows; for others the context ends where the window does
    always_tied: bool = False


KNOWN = {
    "llama": Architecture("llama", permutes_rotary=True),
    "mistral": Architecture("llama", permutes_rotary=True),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma": Architecture("gemma", shifts_norms=True, always_tied=True),
    "gemma2": Architecture("gemma2", shifts_norms=True, windows=True, always_tied=True),
    "gemma3_text": Architecture("gemma3", shifts_norms=True, windows=True),
    "phi3": Architecture("phi3"),
}
_USUAL_PERIOD = {"gemma2": 2, "gemma3": 6}  # every n-th layer sees everything


def architecture_of(config: Any) -> Architecture:
    """The architecture of a transformers config; an unknown one is refused by name."""
    found = KNOWN.get(config.model_type)
    if found is None:
        raise PalestraError(
            f"the architecture {config.model_type!r} cannot be written as GGUF; known are {', '.join(KNOWN)}. "
            "Use --to hf, and the converter that llama.cpp brings"
        )
    if found.always_tied and not config.tie_word_embeddings:
        raise PalestraError(f"{config.model_type} with an output layer of its own cannot be written as GGUF")
    _check_attention_scale(found.name, config)
    return found


def fields_of(architecture: Architecture, config: Any) -> dict[str, Field]:
    """The metadata of the model, by GGUF key without the architecture's name in front."""
    fields: dict[str, Field] = {
        "block_count": config.num_hidden_layers,
        "context_length": _context_length(architecture, config),
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": head_size(config),
        "attention.value_length": head_size(config),
        "vocab_size": config.vocab_size,
    }
    if softcap := getattr(config, "attn_logit_softcapping", None):
        fields["attn_logit_softcapping"] = float(softcap)
    if softcap := getattr(config, "final_logit_softcapping", None):
        fields["final_logit_softcapping"] = float(softcap)
    return fields | _window_fields(architecture, config) | _rope_fields(config)


def rope_tensors(config: Any) -> dict[str, torch.Tensor]:
    """The divisors of rotary frequencies (Llama 3's scaling, Phi-3's long and short factors)."""
    rope = _rope(config)
    match rope["rope_type"]:
        case "llama3":
            return {"rope_freqs.weight": _llama3_divisors(rope, rotary_size(config))}
        case "longrope":
            return {
                "rope_factors_long.weight": torch.tensor(rope["long_factor"], dtype=torch.float32),
                "rope_factors_short.weight": torch.tensor(rope["short_factor"], dtype=torch.float32),
            }
    return {}


def transform_of(architecture: Architecture, config: Any, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """What is done to the tensor of that (transformers) name before it is written."""
    projection = name.rsplit(".", 2)[-2]
    if architecture.permutes_rotary and projection in ("q_proj", "k_proj"):
        heads = config.num_attention_heads if projection == "q_proj" else config.num_key_value_heads
        return lambda tensor: _pairs_from_halves(tensor, heads)
    if architecture.shifts_norms and projection.endswith("norm"):
        return lambda tensor: tensor.float() + 1
    return lambda tensor: tensor


def head_size(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rotary_size(config: Any) -> int:
    """How many dimensions of a head turn with the position."""
    return int(head_size(config) * _rope(config).get("partial_rotary_factor", 1.0))


def _pairs_from_halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    rest = tensor.shape[1:]
    return tensor.reshape(heads, 2, -1, *rest).transpose(1, 2).reshape(tensor.shape)


def _context_length(architecture: Architecture, config: Any) -> int:
    longest = int(config.max_position_embeddings)
    window = _window(config)
    if window is None or architecture.windows or window >= longest:
        return longest
    log.warning(
        "llama.cpp has no sliding window for %s: the context is written as %d, where both agree, not %d",
        config.model_type,
        window,
        longest,
    )
    return window


def _window(config: Any) -> int | None:
    """The sliding window, where any layer has one."""
    layers = getattr(config, "layer_types", None)
    if layers is not None and "sliding_attention" not in layers:
        return None
    if not getattr(config, "use_sliding_window", True):
        return None
    return getattr(config, "sliding_window", None)


def _window_fields(architecture: Architecture, config: Any) -> dict[str, Field]:
    window = _window(config)
    if not architecture.windows or window is None:
        return {"attention.sliding_window": 0} if architecture.name == "phi3" else {}
    full = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    period = full[0] + 1 if full else max(_USUAL_PERIOD[architecture.name], config.num_hidden_layers + 1)
    if full != list(range(period - 1, config.num_hidden_layers, period)):
        raise PalestraError(f"the layers with full attention, {full}, do not come at regular steps, as GGUF has them")
    fields: dict[str, Field] = {"attention.sliding_window": window}
    if period != _USUAL_PERIOD[architecture.name]:
        fields["attention.sliding_window_pattern"] = period
    return fields


def _rope(config: Any) -> dict[str, Any]:
    """The rotary settings of the layers that see everything."""
    settings: Mapping[str, Any] = config.rope_parameters
    return dict(settings.get("full_attention") or settings)


def _rope_fields(config: Any) -> dict[str, Field]:
    rope = _rope(config)
    fields: dict[str, Field] = {
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": rotary_size(config),
    }
    if local := config.rope_parameters.get("sliding_attention"):
        fields["rope.freq_base_swa"] = float(local["rope_theta"])
        if local["rope_type"] != "default":
            raise PalestraError(f"rope type {local['rope_type']!r} in sliding layers cannot be written as GGUF")
    match rope["rope_type"]:
        case "default" | "llama3":
            pass
        case "linear":
            fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
        case "yarn":
            fields |= _yarn_fields(rope)
        case "longrope":
            fields |= _longrope_fields(rope, config)
        case other:
            raise PalestraError(
                f"rope type {other!r} cannot be written as GGUF; known are default, linear, llama3, yarn, longrope"
            )
    return fields


def _yarn_fields(rope: Mapping[str, Any]) -> dict[str, Field]:
    given = {
        "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
        "rope.scaling.yarn_beta_slow": rope.get("beta_slow"),
        "rope.scaling.yarn_attn_factor": rope.get("attention_factor"),
    }
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        **{key: float(value) for key, value in given.items() if value is not None},
    }


def _longrope_fields(rope: Mapping[str, Any], config: Any) -> dict[str, Field]:
    original = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
    stretch = config.max_position_embeddings / original
    attention = rope.get("attention_factor") or (
        math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    )
    return {
        "rope.scaling.type": "longrope",
        "rope.scaling.original_context_length": original,
        "rope.scaling.attn_factor": float(attention),
    }


def _llama3_divisors(rope: Mapping[str, Any], size: int) -> torch.Tensor:
    """By how much each frequency is slowed: long waves by `factor`, short ones not at all, a ramp between."""
    frequencies = rope["rope_theta"] ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # in the original context
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - kept) / rope["factor"] + kept)).float()


def _check_attention_scale(name: str, config: Any) -> None:
    """llama.cpp reckons Gemma's attention scale itself, from the head's size; at the 27B sizes otherwise."""
    wanted = getattr(config, "query_pre_attn_scalar", None)
    if wanted is None:
        return
    by_heads = (name, config.num_hidden_layers) in (("gemma2", 46), ("gemma3", 62))
    taken = config.hidden_size // config.num_attention_heads if by_heads else head_size(config)
    if wanted != taken:
        raise PalestraError(
            f"query_pre_attn_scalar={wanted} cannot be written as GGUF: llama.cpp would take {taken} for this shape"
        )
