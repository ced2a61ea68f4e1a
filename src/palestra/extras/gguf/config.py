"""The table of architectures, and a model's config and weights <-> those of a GGUF file."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from palestra.core.errors import UnsupportedError
from palestra.extras.gguf.file import GgufFile
from palestra.extras.gguf.rope import head_dim_of, rope_from_gguf, rope_to_gguf

log = logging.getLogger("palestra")


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
    always_tied: bool = False  # GGUF has no separate output layer for it
    optional_bias: bool = False  # config.attention_bias says whether q, k and v have biases
    fields: tuple[ConfigKey, ...] = ()  # in addition to those that all have
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


def is_written_here(config: Any) -> bool:
    """Whether the architecture is one that we write as GGUF ourselves."""
    return any(row.model_type == config.model_type for row in ARCHITECTURES)


def architecture_of(config: Any) -> Architecture:
    """The row of a transformers config; raises for one that cannot be written as GGUF."""
    for row in ARCHITECTURES:
        if row.model_type == config.model_type:
            if row.always_tied and not config.tie_word_embeddings:
                raise UnsupportedError(f"{config.model_type} with an output layer of its own cannot be written as GGUF")
            return row
    raise UnsupportedError(
        f"the architecture {config.model_type!r} cannot be written as GGUF; supported are "
        f"{', '.join(row.model_type for row in ARCHITECTURES)}. For others, give the folder of llama.cpp (--llama-cpp, "
        "llama_cpp_path or LLAMA_CPP_PATH), whose convert_hf_to_gguf.py is then used"
    )


def architecture_of_file(file: GgufFile) -> Architecture:
    """The row of a GGUF file; raises for one that cannot be loaded."""
    experts = " with experts" if file.field("expert_count") else ""
    for row in ARCHITECTURES:
        if row.name == file.architecture and not experts:
            return row
    names = dict.fromkeys(row.name for row in ARCHITECTURES)
    raise UnsupportedError(
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
        # from transformers' order of a head's rows (half, pair) to llama.cpp's (pair, half)
        return weight.reshape(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
    return weight.float() + architecture.norm_offset if _has_offset(architecture, name) else weight


def weight_from_gguf(architecture: Architecture, config: Any, name: str, weight: torch.Tensor) -> torch.Tensor:
    """The inverse of `weight_to_gguf`."""
    if heads := _permuted_heads(architecture, config, name):
        return weight.reshape(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
    return weight - architecture.norm_offset if _has_offset(architecture, name) else weight


def _permuted_heads(architecture: Architecture, config: Any, name: str) -> int:
    """The number of heads of a query or key projection that has to be permuted; 0 for other weights."""
    if not architecture.permutes_qk:
        return 0
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    return int(heads.get(name.split(".")[-2], 0))


def _has_offset(architecture: Architecture, name: str) -> bool:
    return bool(architecture.norm_offset) and name.endswith("norm.weight")


def config_from_gguf(file: GgufFile) -> Any:
    """The transformers config of the model in the file."""
    from transformers import AutoConfig

    architecture = architecture_of_file(file)
    settings: dict[str, Any] = {
        field.name: file.required_number(field.key, field.type, field.least) for field in REQUIRED_FIELDS
    }
    _check_sizes(file, settings)
    heads = settings["num_attention_heads"]
    settings |= {"num_key_value_heads": heads, "head_dim": settings["hidden_size"] // heads}
    for field in (*OPTIONAL_FIELDS, *architecture.fields):
        if (value := file.number(field.key, field.type, field.default, field.least)) is not None:
            settings[field.name] = value
    if architecture.optional_bias:
        settings["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    config = AutoConfig.for_model(
        architecture.model_type,
        **settings,
        **_window_from_gguf(architecture, file),
        vocab_size=file.shape("token_embd.weight")[0],
        tie_word_embeddings="output.weight" not in file.tensors,
        rope_parameters=rope_from_gguf(file, settings["head_dim"], architecture.local_rope_theta),
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=file.metadata.get("tokenizer.ggml.eos_token_id"),
        pad_token_id=file.metadata.get("tokenizer.ggml.padding_token_id"),
    )
    if architecture.layers_scaled_by_width:
        config.query_pre_attn_scalar = _attention_scale(architecture, config)
    return config


def _check_sizes(file: GgufFile, settings: dict[str, Any]) -> None:
    """Refuse sizes that do not fit the tensors before a model of that size is allocated."""
    blocks = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    for key, value, found in (
        ("block_count", settings["num_hidden_layers"], len(blocks)),
        ("embedding_length", settings["hidden_size"], file.shape("token_embd.weight")[-1]),
    ):
        if value != found:
            raise file.corrupt(f"{file.architecture}.{key} is {value}, but its tensors have {found}")
    if settings["num_attention_heads"] > settings["hidden_size"]:
        raise file.corrupt(f"it has {settings['num_attention_heads']} heads in {settings['hidden_size']} dimensions")


def config_to_gguf(config: Any) -> dict[str, str | int | float]:
    """The config as GGUF metadata, by key without the architecture's name in front."""
    architecture = architecture_of(config)
    scale, derived = getattr(config, "query_pre_attn_scalar", None), _attention_scale(architecture, config)
    if scale is not None and scale != derived:
        raise UnsupportedError(
            f"query_pre_attn_scalar={scale} cannot be written as GGUF: llama.cpp uses {derived} for this shape"
        )
    fields: dict[str, Any] = {}
    for field in (*REQUIRED_FIELDS, *OPTIONAL_FIELDS, *architecture.fields):
        if (value := getattr(config, field.name, None)) is not None:
            fields[field.key] = field.type(value)
    head_dim = head_dim_of(config)
    fields |= {
        "context_length": _context_length(architecture, config),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "vocab_size": config.vocab_size,
    }
    return fields | _window_to_gguf(architecture, config) | rope_to_gguf(config)


def _attention_scale(architecture: Architecture, config: Any) -> int:
    """Gemma's query_pre_attn_scalar, which GGUF does not store and llama.cpp derives from the shape."""
    by_width = config.num_hidden_layers == architecture.layers_scaled_by_width
    return int(config.hidden_size // config.num_attention_heads if by_width else head_dim_of(config))


def _window_from_gguf(architecture: Architecture, file: GgufFile) -> dict[str, Any]:
    """The sliding window and which layers have it."""
    window = file.number("attention.sliding_window", int, architecture.window)
    if architecture.name == "phi3":
        context = file.required_number("context_length", int)
        original = file.number("rope.scaling.original_context_length", int, context, least=1)
        return {"sliding_window": window or None, "original_max_position_embeddings": original}
    if not architecture.window:
        return {}
    period = file.number("attention.sliding_window_pattern", int, architecture.full_attention_period, least=1) or 1
    layers = range(1, file.required_number("block_count", int) + 1)
    return {
        "sliding_window": window,
        "layer_types": ["sliding_attention" if layer % period else "full_attention" for layer in layers],
    }


def _window_to_gguf(architecture: Architecture, config: Any) -> dict[str, int]:
    window = _window_of(config)
    if not architecture.window or window is None:
        return {"attention.sliding_window": 0} if architecture.name == "phi3" else {}
    default = architecture.full_attention_period
    full = [i for i, kind in enumerate(config.layer_types) if kind == "full_attention"]
    period = full[0] + 1 if full else max(default, config.num_hidden_layers + 1)
    if full != list(range(period - 1, config.num_hidden_layers, period)):
        raise UnsupportedError(
            f"GGUF needs layers with full attention at regular intervals; this model has them at {full}"
        )
    pattern = {} if period == default else {"attention.sliding_window_pattern": period}
    return {"attention.sliding_window": window, **pattern}


def _window_of(config: Any) -> int | None:
    """The sliding window, where any layer has one."""
    layers = getattr(config, "layer_types", None)
    if layers is not None and "sliding_attention" not in layers:
        return None
    if not getattr(config, "use_sliding_window", True):
        return None
    return getattr(config, "sliding_window", None)


def _context_length(architecture: Architecture, config: Any) -> int:
    """The context, cut to the sliding window where llama.cpp has none: up to there both give the same."""
    longest = int(config.max_position_embeddings)
    window = _window_of(config)
    if window is None or architecture.window or window >= longest:
        return longest
    log.warning(
        "llama.cpp has no sliding window for %s: the context length is written as %d (the window) instead of %d",
        config.model_type,
        window,
        longest,
    )
    return window
