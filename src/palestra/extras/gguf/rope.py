"""Transformers' RoPE parameters <-> the metadata and tensors of a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
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

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}  # the same for every Llama 3
_MAX_HEAD_DIM = 1 << 16
_LLAMA3_CONTEXT = 8192  # the usual original context


def rope_from_gguf(file: GgufFile, head_dim: int, local_theta: float = 0.0) -> dict[str, Any]:
    """`config.rope_parameters`; two sets of them where layers with a sliding window have a RoPE base of their own."""
    size = file.number("rope.dimension_count", int, head_dim, least=2) or head_dim
    if size > head_dim or head_dim > _MAX_HEAD_DIM:
        raise file.corrupt(f"it rotates {size} dimensions of heads with {head_dim}")
    theta = file.number("rope.freq_base", float, 10_000.0, least=1)
    rope: dict[str, Any] = {"rope_type": _rope_type(file), "rope_theta": theta}
    if size != head_dim:
        rope["partial_rotary_factor"] = size / head_dim
    for name, key in _KEYS[rope["rope_type"]].items():
        key_in_file = f"rope.scaling.{key}"
        if key not in _OPTIONAL_KEYS:
            file.required(key_in_file)
        value = file.number(key_in_file, float)
        if value is not None:
            rope[name] = _number(name, value)
    match rope["rope_type"]:
        case "llama3":
            rope |= _fit_llama3(file, rope["rope_theta"], size)
        case "longrope":
            rope |= {name: file.tensor(tensor).tolist() for name, tensor in _FACTORS.items()}
    if not local_theta:
        return rope
    local = {"rope_type": "default", "rope_theta": file.number("rope.freq_base_swa", float, local_theta, least=1)}
    return {"full_attention": rope, "sliding_attention": local}


def rope_to_gguf(config: Any) -> dict[str, Any]:
    """The metadata for `config.rope_parameters`, by key without the architecture's name in front."""
    rope = _rope_of(config)
    fields: dict[str, Any] = {"rope.freq_base": float(rope["rope_theta"]), "rope.dimension_count": _rotary_dim(config)}
    if local := config.rope_parameters.get("sliding_attention"):
        fields["rope.freq_base_swa"] = float(local["rope_theta"])
        if local["rope_type"] != "default":
            raise UnsupportedError(f"rope type {local['rope_type']!r} in sliding layers cannot be written as GGUF")
    if rope["rope_type"] not in _KEYS:
        raise UnsupportedError(
            f"rope type {rope['rope_type']!r} cannot be written as GGUF; supported are {', '.join(_KEYS)}"
        )
    for name, key in _KEYS[rope["rope_type"]].items():
        if rope.get(name) is not None:
            fields["rope.scaling.type"] = rope["rope_type"]
            fields[f"rope.scaling.{key}"] = _number(name, rope[name])
    return fields


def rope_tensors(config: Any) -> dict[str, torch.Tensor]:
    """The tensors that GGUF stores: Llama 3's divisors of the frequencies, Phi-3's long and short factors."""
    rope = _rope_of(config)
    match rope["rope_type"]:
        case "llama3":
            divisors = _llama3_divisors(rope, _wavelengths(rope["rope_theta"], _rotary_dim(config)))
            return {_DIVISORS: torch.tensor(divisors, dtype=torch.float32)}
        case "longrope":
            return {tensor: torch.tensor(rope[name], dtype=torch.float32) for name, tensor in _FACTORS.items()}
    return {}


def head_dim_of(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rotary_dim(config: Any) -> int:
    """How many dimensions of a head are rotated."""
    return int(head_dim_of(config) * _rope_of(config).get("partial_rotary_factor", 1.0))


def _rope_type(file: GgufFile) -> str:
    if _DIVISORS in file.tensors:
        return "llama3"
    if _FACTORS["long_factor"] in file.tensors:
        return "longrope"
    name = str(file.field("rope.scaling.type", "none"))
    if name not in ("none", "linear", "yarn"):
        raise UnsupportedError(
            f"{file.path} has the RoPE scaling {name!r}, which is not supported; give the model's Hugging Face folder"
        )
    return "default" if name == "none" else name


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


def _llama3_divisors(rope: Mapping[str, Any], wavelengths: np.ndarray) -> np.ndarray:
    """By how much each frequency is divided: low ones by `factor`, high ones not at all, interpolated between."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    rotations = rope["original_max_position_embeddings"] / wavelengths
    unscaled = np.clip((rotations - low) / (high - low), 0, 1)
    return 1 / ((1 - unscaled) / rope["factor"] + unscaled)


def _fit_llama3(file: GgufFile, theta: float, size: int) -> dict[str, Any]:
    """Llama 3's parameters, of which the file has only the divisors that they give."""
    divisors = file.tensor(_DIVISORS).astype(np.float64)  # [size / 2]
    wavelengths = _wavelengths(theta, size)
    for original in _original_contexts(divisors, wavelengths):
        rope = {"factor": float(divisors.max()), "original_max_position_embeddings": original, **_LLAMA3}
        if np.allclose(_llama3_divisors(rope, wavelengths), divisors, rtol=1e-4):
            return rope
    raise UnsupportedError(
        f"{file.path} scales RoPE frequencies otherwise than Llama 3 does; give the model's Hugging Face folder"
    )


def _original_contexts(divisors: np.ndarray, wavelengths: np.ndarray) -> Iterator[int]:
    """Candidates: the usual one, those that explain an interpolated frequency, the shortest for the unscaled ones."""
    yield _LLAMA3_CONTEXT
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    factor = divisors.max()
    unscaled = divisors <= 1 + 1e-6
    interpolated = ~unscaled & (divisors < factor * (1 - 1e-6))
    share = (1 / divisors[interpolated] - 1 / factor) / (1 - 1 / factor)
    yield from (round(rotations) for rotations in wavelengths[interpolated] * (low + share * (high - low)))
    if unscaled.any():
        yield math.ceil(high * wavelengths[unscaled].max())
