"""Transformers' config <-> the metadata of a GGUF file."""

from __future__ import annotations

import logging
from typing import Any

from palestra.core.errors import PalestraError
from palestra.models.gguf.architectures import (
    OPTIONAL_FIELDS,
    REQUIRED_FIELDS,
    Architecture,
    architecture_of,
    architecture_of_file,
)
from palestra.models.gguf.file import GgufFile
from palestra.models.gguf.rope import head_dim_of, rope_from_gguf, rope_to_gguf

log = logging.getLogger("palestra")


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
    _check_attention_scale(architecture, config)
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


def _check_attention_scale(architecture: Architecture, config: Any) -> None:
    scale = getattr(config, "query_pre_attn_scalar", None)
    derived = _attention_scale(architecture, config)
    if scale is not None and scale != derived:
        raise PalestraError(
            f"query_pre_attn_scalar={scale} cannot be written as GGUF: llama.cpp uses {derived} for this shape"
        )


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
        raise PalestraError(
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
