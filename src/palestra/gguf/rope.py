"""How a GGUF file's model turns positions into rotations -> transformers' rope parameters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from palestra.core.errors import PalestraError
from palestra.gguf.file import GgufFile

_LOW, _HIGH = 1.0, 4.0  # of every Llama 3: waves this many times in the original context are slowed, or left alone
_USUAL_CONTEXT = 8192
_FOLDER = "give its Hugging Face folder instead"


def rope_of(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """The rope parameters of the layers that see everything."""
    size = int(file.own("rope.dimension_count", head_dim))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(file.own("rope.freq_base", 10_000.0))}
    if size != head_dim:
        rope["partial_rotary_factor"] = size / head_dim
    if "rope_freqs.weight" in file.tensors:
        return rope | _llama3(file, rope["rope_theta"], size)
    if "rope_factors_long.weight" in file.tensors:
        return rope | _longrope(file)
    factor = float(file.own("rope.scaling.factor", 1.0))
    match file.own("rope.scaling.type", "none"):
        case "none":
            return rope
        case "linear":
            return rope | {"rope_type": "linear", "factor": factor}
        case "yarn":
            return rope | {"rope_type": "yarn", "factor": factor, **_yarn(file)}
        case other:
            raise PalestraError(f"{file.path} scales its positions by {other!r}, which is not known here; {_FOLDER}")


def _yarn(file: GgufFile) -> dict[str, Any]:
    keys = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor"}
    given = {name: file.own(f"rope.scaling.{key}") for name, key in keys.items()}
    return {
        "original_max_position_embeddings": int(file.needed("rope.scaling.original_context_length")),
        **{name: float(value) for name, value in given.items() if value is not None},
    }


def _longrope(file: GgufFile) -> dict[str, Any]:
    original = int(file.needed("rope.scaling.original_context_length"))
    return {
        "rope_type": "longrope",
        "long_factor": file.tensor("rope_factors_long.weight").tolist(),
        "short_factor": file.tensor("rope_factors_short.weight").tolist(),
        "attention_factor": float(file.needed("rope.scaling.attn_factor")),
        "original_max_position_embeddings": original,
    }


def _llama3(file: GgufFile, theta: float, size: int) -> dict[str, Any]:
    """Llama 3's scaling, of which the file keeps only the outcome: by how much each frequency is slowed."""
    divisors = file.tensor("rope_freqs.weight").astype(np.float64)  # [size / 2]
    waves = 2 * math.pi * theta ** (np.arange(0, size, 2) / size)
    factor = float(divisors.max())
    for original in (_USUAL_CONTEXT, *_contexts(divisors, waves, factor)):
        kept = np.clip((original / waves - _LOW) / (_HIGH - _LOW), 0, 1)
        if np.allclose(1 / ((1 - kept) / factor + kept), divisors, rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
                "original_max_position_embeddings": original,
            }
    raise PalestraError(f"{file.path} scales its positions otherwise than Llama 3 does; {_FOLDER}")


def _contexts(divisors: np.ndarray, waves: np.ndarray, factor: float) -> list[int]:
    """Original contexts that explain the frequencies which are slowed in part, then the shortest one possible."""
    between = (divisors > 1 + 1e-6) & (divisors < factor * (1 - 1e-6))
    kept = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
    found = [
        round(float(wave * (_LOW + share * (_HIGH - _LOW)))) for wave, share in zip(waves[between], kept, strict=True)
    ]
    alone = waves[divisors <= 1 + 1e-6]
    return [*found, *([math.ceil(_HIGH * float(alone.max()))] if len(alone) else [])]
