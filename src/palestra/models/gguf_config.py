"""A GGUF file's metadata -> a transformers config."""

from __future__ import annotations

from typing import Any

from palestra.core.errors import PalestraError
from palestra.models.gguf_file import GgufFile

# GGUF architecture -> transformers' model type
MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}


def config_of(file: GgufFile) -> Any:
    """The config of the model in the file."""
    from transformers import AutoConfig

    if file.architecture not in MODEL_TYPES or file.own("expert_count"):
        kind = f"{file.architecture or 'unnamed'}{' with experts' if file.own('expert_count') else ''}"
        raise PalestraError(
            f"{file.path} holds a model of the architecture {kind}, which cannot be loaded from GGUF here; "
            f"known are {', '.join(MODEL_TYPES)}. Give its Hugging Face folder instead."
        )
    heads, width = int(file.needed("attention.head_count")), int(file.needed("embedding_length"))
    head_dim = int(file.own("attention.key_length", width // heads))
    settings: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": int(file.needed("block_count")),
        "intermediate_size": int(file.needed("feed_forward_length")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(file.own("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "max_position_embeddings": int(file.needed("context_length")),
        "rms_norm_eps": float(file.needed("attention.layer_norm_rms_epsilon")),
        "vocab_size": int(file.tensors["token_embd.weight"].shape[1]),  # GGUF names the fastest axis first
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(file),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
        **_special(file, head_dim),
    }
    return AutoConfig.for_model(MODEL_TYPES[file.architecture], **settings)


def _special(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """What one architecture has and the others have not."""
    biased = "blk.0.attn_q.bias" in file.tensors
    match file.architecture:
        case "llama":
            return {"attention_bias": biased}
        case "qwen3":
            return {"attention_bias": biased}
        case "gemma2":
            return {
                "query_pre_attn_scalar": head_dim,
                "sliding_window": int(file.own("attention.sliding_window", 4096)),
                "attn_logit_softcapping": float(file.own("attn_logit_softcapping", 50.0)),
                "final_logit_softcapping": float(file.own("final_logit_softcapping", 30.0)),
            }
        case "gemma3":
            return {
                "query_pre_attn_scalar": head_dim,
                "sliding_window": int(file.own("attention.sliding_window", 1024)),
                "rope_parameters": {
                    "full_attention": _rope(file),
                    "sliding_attention": {
                        "rope_type": "default",
                        "rope_theta": float(file.own("rope.freq_base_swa", 10_000.0)),
                    },
                },
            }
        case "phi3":
            window = file.own("attention.sliding_window")
            return {"sliding_window": int(window) if window else None}
        case _:
            return {}


def _rope(file: GgufFile) -> dict[str, Any]:
    """How positions are turned into rotations."""
    base = {"rope_theta": float(file.own("rope.freq_base", 10_000.0))}
    if "rope_freqs.weight" in file.tensors:
        return {**base, **_llama3_rope(file)}
    if "rope_factors_long.weight" in file.tensors:
        raise PalestraError(f"{file.path} uses long-rope positions, which cannot be loaded from GGUF here; {_FOLDER}")
    factor = float(file.own("rope.scaling.factor", 1.0))
    match file.own("rope.scaling.type", "none"):
        case "none":
            return {**base, "rope_type": "default"}
        case "linear":
            return {**base, "rope_type": "linear", "factor": factor}
        case "yarn":
            original = int(file.needed("rope.scaling.original_context_length"))
            return {**base, "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        case other:
            raise PalestraError(f"{file.path} scales its positions by {other!r}, which is not known here; {_FOLDER}")


_FOLDER = "give its Hugging Face folder instead"


def _llama3_rope(file: GgufFile) -> dict[str, Any]:
    """Llama 3.1 and later: the file keeps the resulting divisors, the largest of which is the factor."""
    divisors = file.tensor("rope_freqs.weight")
    return {
        "rope_type": "llama3",
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
