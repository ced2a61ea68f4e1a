"""Transformers' RoPE parameters <-> the metadata and tensors of a GGUF file."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from palestra.core.errors import UnsupportedError
from palestra.extras.gguf.file import GgufFile

# transformers' rope_type -> {its parameter: the GGUF key below rope.scaling}
_KEYS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {},  # stored as a tensor of divisors instead
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_context_length",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
        "attention_factor": "yarn_attn_factor",
    },
    "longrope": {
        "original_max_position_embeddings": "original_context_length",
        "attention_factor": "attn_factor",
    },
}
_OPTIONAL_KEYS = {"yarn_beta_fast", "yarn_beta_slow", "yarn_attn_factor"}
_DIVISORS = "rope_freqs.weight"
_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
ROPE_TENSORS = {_DIVISORS, *_FACTORS.values()}
_LOW, _HIGH = 1.0, 4.0  # low_freq_factor and high_freq_factor, the same for every Llama 3
_LLAMA3_CONTEXT = 8192  # the usual original context
_MAX_HEAD_DIM = 1 << 16


def rope_from_gguf(file: GgufFile, head_dim: int, local_theta: float = 0.0) -> dict[str, Any]:
    """`config.rope_parameters`; two sets of them where layers with a sliding window have a RoPE base of their own."""
    size = file.number("rope.dimension_count", int, head_dim, least=2)
    if size > head_dim or head_dim > _MAX_HEAD_DIM:
        raise file.corrupt(f"it rotates {size} dimensions of heads with {head_dim}")
    kind = {"none": "default"}.get(scaling := str(file.field("rope.scaling.type", "none")), scaling)
    rope: dict[str, Any] = {"rope_theta": file.number("rope.freq_base", float, 10_000.0, least=1)}
    if _DIVISORS in file.tensors:
        kind, rope = "llama3", rope | _fit_llama3(file, rope["rope_theta"], size)
    elif _FACTORS["long_factor"] in file.tensors:
        kind, rope = "longrope", rope | {name: file.tensor(tensor).tolist() for name, tensor in _FACTORS.items()}
    elif kind not in ("default", "linear", "yarn"):
        raise UnsupportedError(
            f"{file.path} has the RoPE scaling {kind!r}, which is not supported; give the model's Hugging Face folder"
        )
    rope["rope_type"] = kind
    if size != head_dim:
        rope["partial_rotary_factor"] = size / head_dim
    for name, key in _KEYS[kind].items():
        if key not in _OPTIONAL_KEYS or file.field(f"rope.scaling.{key}") is not None:
            rope[name] = _number(name, file.number(f"rope.scaling.{key}", float))
    if not local_theta:
        return rope
    local = {"rope_type": "default", "rope_theta": file.number("rope.freq_base_swa", float, local_theta, least=1)}
    return {"full_attention": rope, "sliding_attention": local}


def rope_to_gguf(config: Any) -> dict[str, Any]:
    """The metadata for `config.rope_parameters`, by key without the architecture's name in front."""
    rope = _rope_of(config)
    fields: dict[str, Any] = {"rope.freq_base": float(rope["rope_theta"]), "rope.dimension_count": _rotary_dim(config)}
    if local := config.rope_parameters.get("sliding_attention", {}):
        fields["rope.freq_base_swa"] = float(local["rope_theta"])
    kind, local_kind = rope["rope_type"], local.get("rope_type", "default")
    if kind not in _KEYS or local_kind != "default":
        raise UnsupportedError(
            f"rope type {local_kind if kind in _KEYS else kind!r} cannot be written as GGUF; supported are "
            f"{', '.join(_KEYS)}, and for sliding layers default"
        )
    for name, key in _KEYS[rope["rope_type"]].items():
        if rope.get(name) is not None:
            fields["rope.scaling.type"] = rope["rope_type"]
            fields[f"rope.scaling.{key}"] = _number(name, rope[name])
    return fields


def rope_tensors(config: Any) -> dict[str, torch.Tensor]:
    """The tensors that GGUF stores: Llama 3's divisors of the frequencies, Phi-3's long and short factors."""
    rope, tensors = _rope_of(config), dict[str, Any]()
    if rope["rope_type"] == "llama3":
        tensors[_DIVISORS] = _llama3_divisors(rope, _wavelengths(rope["rope_theta"], _rotary_dim(config)))
    elif rope["rope_type"] == "longrope":
        tensors = {tensor: rope[name] for name, tensor in _FACTORS.items()}
    return {name: torch.tensor(values, dtype=torch.float32) for name, values in tensors.items()}


def head_dim_of(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rotary_dim(config: Any) -> int:
    """The number of dimensions of a head that are rotated."""
    return int(head_dim_of(config) * _rope_of(config).get("partial_rotary_factor", 1.0))


def _rope_of(config: Any) -> dict[str, Any]:
    """The RoPE parameters of the layers with full attention, with longrope's defaults filled in."""
    rope = dict(config.rope_parameters.get("full_attention") or config.rope_parameters)
    if rope["rope_type"] == "longrope":
        original = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
        stretch = config.max_position_embeddings / original
        usual = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
        attention = rope.get("attention_factor") or usual
        rope |= {"original_max_position_embeddings": original, "attention_factor": attention}
    return rope


def _number(name: str, value: Any) -> int | float:
    return int(value) if name == "original_max_position_embeddings" else float(value)


def _wavelengths(theta: float, size: int) -> np.ndarray:
    """In tokens, of each pair of dimensions: [size / 2]."""
    return 2 * math.pi * theta ** (np.arange(0, size, 2, dtype=np.float64) / size)


def _llama3_divisors(rope: dict[str, Any], wavelengths: np.ndarray) -> np.ndarray:
    """By how much each frequency is divided: low ones by `factor`, high ones not at all, interpolated between."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    rotations = rope["original_max_position_embeddings"] / wavelengths
    unscaled = np.clip((rotations - low) / (high - low), 0, 1)
    return 1 / ((1 - unscaled) / rope["factor"] + unscaled)


def _fit_llama3(file: GgufFile, theta: float, size: int) -> dict[str, Any]:
    """Llama 3's parameters, of which the file has only the resulting divisors."""
    divisors = file.tensor(_DIVISORS).astype(np.float64)  # [size / 2]
    wavelengths, factor = _wavelengths(theta, size), float(divisors.max())
    unscaled = (1 / divisors - 1 / factor) / (1 - 1 / factor) if factor > 1 else np.ones_like(divisors)
    # The original context: the usual one, that of an interpolated frequency, or the shortest for the unscaled ones
    contexts = wavelengths * (_LOW + unscaled * (_HIGH - _LOW))
    for context in (_LLAMA3_CONTEXT, *np.round(contexts), *np.ceil(contexts)):
        rope = {"factor": factor, "original_max_position_embeddings": int(context)}
        rope |= {"low_freq_factor": _LOW, "high_freq_factor": _HIGH}
        if np.allclose(_llama3_divisors(rope, wavelengths), divisors, rtol=1e-4):
            return rope
    raise UnsupportedError(
        f"{file.path} scales RoPE frequencies in another way than Llama 3; give the model's Hugging Face folder"
    )
