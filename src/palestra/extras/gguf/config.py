"""The table of architectures, and a model's config and weights <-> those of a GGUF file."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from palestra.core.errors import UnsupportedError
from palestra.extras.gguf.file import GgufFile

log = logging.getLogger("palestra")


class Number(NamedTuple):
    """A number of a model: its name in transformers' config, and its GGUF key without the architecture's name."""

    name: str
    key: str
    kind: type[int] | type[float]
    is_required: bool = True


_NUMBERS = (
    Number("num_hidden_layers", "block_count", int),
    Number("hidden_size", "embedding_length", int),
    Number("intermediate_size", "feed_forward_length", int),
    Number("num_attention_heads", "attention.head_count", int),
    Number("max_position_embeddings", "context_length", int),
    Number("rms_norm_eps", "attention.layer_norm_rms_epsilon", float),
    Number("num_key_value_heads", "attention.head_count_kv", int, False),
    Number("head_dim", "attention.key_length", int, False),
    Number("attn_logit_softcapping", "attn_logit_softcapping", float, False),
    Number("final_logit_softcapping", "final_logit_softcapping", float, False),
)
_ORIGINAL = Number("original_max_position_embeddings", "rope.scaling.original_context_length", int)
# transformers' rope_type -> its parameters
_ROPE: dict[str, tuple[Number, ...]] = {
    "default": (),
    "linear": (Number("factor", "rope.scaling.factor", float),),
    "llama3": (),  # stored as a tensor of divisors instead
    "yarn": (
        Number("factor", "rope.scaling.factor", float),
        _ORIGINAL,
        Number("beta_fast", "rope.scaling.yarn_beta_fast", float, False),
        Number("beta_slow", "rope.scaling.yarn_beta_slow", float, False),
        Number("attention_factor", "rope.scaling.yarn_attn_factor", float, False),
    ),
    "longrope": (_ORIGINAL, Number("attention_factor", "rope.scaling.attn_factor", float)),
}
_DIVISORS = "rope_freqs.weight"
_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
ROPE_TENSORS = {_DIVISORS, *_FACTORS.values()}
_LOW, _HIGH = 1.0, 4.0  # low_freq_factor and high_freq_factor, the same for every Llama 3
_LLAMA3_CONTEXT = 8192  # the usual original context
_MAX_HEAD_DIM = 1 << 16


def _read(file: GgufFile, numbers: Sequence[Number]) -> dict[str, Any]:
    found = [n for n in numbers if n.is_required or file.field(n.key) is not None]
    return {n.name: file.number(n.key, n.kind, least=int(n.kind is int)) for n in found}


def _written(value_of: Callable[[str], Any], numbers: Sequence[Number]) -> dict[str, Any]:
    return {n.key: n.kind(value) for n in numbers if (value := value_of(n.name)) is not None}


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
        raise UnsupportedError(f"{file.path} has the unsupported RoPE scaling {kind!r}; give the Hugging Face folder")
    rope["rope_type"] = kind
    if size != head_dim:
        rope["partial_rotary_factor"] = size / head_dim
    rope |= _read(file, _ROPE[kind])
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
    if kind not in _ROPE or local_kind != "default":
        raise UnsupportedError(
            f"rope type {local_kind if kind in _ROPE else kind!r} cannot be written as GGUF; supported are "
            f"{', '.join(_ROPE)}, and for sliding layers default"
        )
    scaling = _written(rope.get, _ROPE[kind])
    return fields | ({"rope.scaling.type": kind} if scaling else {}) | scaling


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
    raise UnsupportedError(f"{file.path} scales RoPE frequencies unlike Llama 3; give the Hugging Face folder")


@dataclass(frozen=True)
class Architecture:
    """One architecture of llama.cpp, and how it differs from transformers."""

    name: str  # GGUF's general.architecture
    model_type: str  # transformers' config.model_type
    permutes_qk: bool = False  # llama.cpp rotates neighbouring pairs of a head, transformers its two halves
    norms_from_one: bool = False  # norms scale by 1 + weight, and GGUF stores the sum
    always_tied: bool = False  # GGUF has no separate output layer for it
    optional_bias: bool = False  # config.attention_bias says whether q, k and v have biases
    # Sliding windows, where llama.cpp supports them: the defaults for files that do not say.
    window: int = 0
    period: int = 0  # every n-th layer has full attention
    local_theta: float = 0.0  # RoPE base of the layers with a window, if they have their own
    # With this many layers (the 27B model), attention scores are scaled by hidden_size / heads, not by head_dim.
    wide_layers: int = 0


# If two rows share a GGUF name, a file is read as the first of them.
ARCHITECTURES = (
    Architecture("llama", "llama", permutes_qk=True, optional_bias=True),
    Architecture("llama", "mistral", permutes_qk=True),
    Architecture("qwen2", "qwen2"),
    Architecture("qwen3", "qwen3", optional_bias=True),
    Architecture("gemma", "gemma", norms_from_one=True, always_tied=True),
    Architecture("gemma2", "gemma2", norms_from_one=True, always_tied=True, window=4096, period=2, wide_layers=46),
    Architecture("gemma3", "gemma3_text", norms_from_one=True, window=1024, period=6, local_theta=1e4, wide_layers=62),
    Architecture("phi3", "phi3"),
)


def is_written_here(config: Any) -> bool:
    """Whether we write this architecture as GGUF ourselves."""
    return any(row.model_type == config.model_type for row in ARCHITECTURES)


def architecture_of(config: Any) -> Architecture:
    """The row of a transformers config; raises for one that cannot be written as GGUF."""
    row = next((row for row in ARCHITECTURES if row.model_type == config.model_type), None)
    if row is None:
        raise UnsupportedError(
            f"the architecture {config.model_type!r} cannot be written as GGUF; supported are "
            f"{', '.join(row.model_type for row in ARCHITECTURES)}. For others, give the folder of llama.cpp "
            "(--llama-cpp, llama_cpp_path or LLAMA_CPP_PATH), whose convert_hf_to_gguf.py is then used"
        )
    if row.always_tied and not config.tie_word_embeddings:
        raise UnsupportedError(f"{config.model_type} with an output layer of its own cannot be written as GGUF")
    return row


def architecture_of_file(file: GgufFile) -> Architecture:
    """The row of a GGUF file; raises for one that cannot be loaded."""
    experts = " with experts" if file.field("expert_count") else ""
    row = next((row for row in ARCHITECTURES if row.name == file.architecture), None)
    if row is None or experts:
        raise UnsupportedError(
            f"{file.path} has the architecture {file.architecture or '(none)'}{experts}, which cannot be loaded from "
            f"GGUF; supported are {', '.join(dict.fromkeys(row.name for row in ARCHITECTURES))}. Give the model's "
            "Hugging Face folder instead."
        )
    return row


def tensor_names(architecture: Architecture, layers: int) -> Callable[[str], str | None]:
    """A function from transformers' name of a weight to GGUF's; None for weights that GGUF does not have."""
    import gguf

    key = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture.name)
    names = gguf.get_tensor_name_map(key, layers)
    return lambda name: names.get_name(name, try_suffixes=(".weight", ".bias"))


def convert_weight(
    architecture: Architecture, config: Any, name: str, weight: torch.Tensor, *, to_gguf: bool
) -> torch.Tensor:
    """The weight of that (transformers) name as GGUF stores it, or back."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if architecture.permutes_qk and heads:
        # the order of a head's rows: (half, pair) in transformers, (pair, half) in llama.cpp
        order = (2, -1) if to_gguf else (-1, 2)
        return weight.reshape(heads, *order, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
    if architecture.norms_from_one and name.endswith("norm.weight"):
        return weight.float() + (1 if to_gguf else -1)
    return weight


def config_from_gguf(file: GgufFile) -> Any:
    """The transformers config of the model in the file."""
    from transformers import AutoConfig

    architecture = architecture_of_file(file)
    settings = _read(file, [n for n in _NUMBERS if n.is_required])
    heads, width, layers = (settings[name] for name in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    # Reject sizes that do not fit the tensors before a model of that size is allocated.
    blocks = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    vocabulary, row_size = file.shape("token_embd.weight")
    for key, value, actual in (("block_count", layers, len(blocks)), ("embedding_length", width, row_size)):
        if value != actual:
            raise file.corrupt(f"{file.architecture}.{key} is {value}, but its tensors have {actual}")
    if heads > width:
        raise file.corrupt(f"it has {heads} heads in {width} dimensions")
    settings |= {"num_key_value_heads": heads, "head_dim": width // heads} | _read(file, _NUMBERS)
    if architecture.optional_bias:
        settings["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if architecture.name == "phi3":
        original = file.number("rope.scaling.original_context_length", int, settings["max_position_embeddings"], 1)
        window = file.number("attention.sliding_window", int, 0) or None
        settings |= {"sliding_window": window, "original_max_position_embeddings": original}
    elif architecture.window:
        period = file.number("attention.sliding_window_pattern", int, architecture.period, least=1)
        settings["sliding_window"] = file.number("attention.sliding_window", int, architecture.window)
        settings["layer_types"] = [
            "sliding_attention" if layer % period else "full_attention" for layer in range(1, layers + 1)
        ]
    config = AutoConfig.for_model(
        architecture.model_type,
        **settings,
        vocab_size=vocabulary,
        tie_word_embeddings="output.weight" not in file.tensors,
        rope_parameters=rope_from_gguf(file, settings["head_dim"], architecture.local_theta),
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=file.metadata.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=file.metadata.get("tokenizer.ggml.padding_token_id"),
    )
    if architecture.wide_layers:
        config.query_pre_attn_scalar = _attention_scale(architecture, config)
    return config


def config_to_gguf(config: Any) -> dict[str, str | int | float]:
    """The config as GGUF metadata, by key without the architecture's name in front."""
    architecture = architecture_of(config)
    scale, derived = getattr(config, "query_pre_attn_scalar", None), _attention_scale(architecture, config)
    if scale is not None and scale != derived:
        raise UnsupportedError(f"query_pre_attn_scalar={scale} is not GGUF's: llama.cpp uses {derived} for this shape")
    fields = _written(lambda name: getattr(config, name, None), _NUMBERS)
    fields |= dict.fromkeys(("attention.key_length", "attention.value_length"), head_dim_of(config))
    return fields | {"vocab_size": config.vocab_size} | _window_to_gguf(architecture, config) | rope_to_gguf(config)


def _attention_scale(architecture: Architecture, config: Any) -> int:
    """Gemma's query_pre_attn_scalar, which GGUF does not store and llama.cpp derives from the shape."""
    by_width = config.num_hidden_layers == architecture.wide_layers
    return int(config.hidden_size // config.num_attention_heads if by_width else head_dim_of(config))


def _window_to_gguf(architecture: Architecture, config: Any) -> dict[str, int]:
    """The sliding window; if llama.cpp has none for the architecture, a context cut to it: the results are the same."""
    layers = getattr(config, "layer_types", None)
    has_window = layers is None or "sliding_attention" in layers
    has_window = has_window and getattr(config, "use_sliding_window", True)
    window = getattr(config, "sliding_window", None) if has_window else None
    if not architecture.window or window is None:
        fields = {"attention.sliding_window": 0} if architecture.name == "phi3" else {}
        if window is not None and window < config.max_position_embeddings:
            fields["context_length"] = window
            log.warning(
                "llama.cpp has no sliding window for %s: the context length is written as %d (the window) instead of "
                "%d",
                config.model_type,
                window,
                config.max_position_embeddings,
            )
        return fields
    default = architecture.period
    full = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    period = full[0] + 1 if full else max(default, config.num_hidden_layers + 1)
    if full != list(range(period - 1, config.num_hidden_layers, period)):
        raise UnsupportedError(f"GGUF needs layers with full attention at regular intervals; this one has {full}")
    pattern = {} if period == default else {"attention.sliding_window_pattern": period}
    return {"attention.sliding_window": window, **pattern}
