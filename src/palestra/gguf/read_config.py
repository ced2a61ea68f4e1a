"""A GGUF file's metadata -> a transformers config."""

from __future__ import annotations

from typing import Any

from palestra.core.errors import PalestraError
from palestra.gguf.file import GgufFile
from palestra.gguf.rope import rope_of

# GGUF architecture -> transformers' model type
MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
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
    if "token_embd.weight" not in file.tensors:
        raise PalestraError(
            f"{file.path} has no tensor token_embd.weight, so it is not whole; download or copy it again"
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
        "vocab_size": int(file.tensors["token_embd.weight"].shape[0]),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": rope_of(file, head_dim),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
        **_special(file, head_dim),
    }
    return AutoConfig.for_model(MODEL_TYPES[file.architecture], **settings)


def _special(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """What one architecture has and the others have not."""
    match file.architecture:
        case "llama" | "qwen3":
            return {"attention_bias": "blk.0.attn_q.bias" in file.tensors}
        case "gemma2":
            return {
                **_windows(file, usual_window=4096, usual_period=2),
                "query_pre_attn_scalar": _attention_scale(file, head_dim, layers_of_27b=46),
                "attn_logit_softcapping": float(file.own("attn_logit_softcapping", 50.0)),
                "final_logit_softcapping": float(file.own("final_logit_softcapping", 30.0)),
            }
        case "gemma3":
            local = {"rope_type": "default", "rope_theta": float(file.own("rope.freq_base_swa", 10_000.0))}
            return {
                **_windows(file, usual_window=1024, usual_period=6),
                "query_pre_attn_scalar": _attention_scale(file, head_dim, layers_of_27b=62),
                "rope_parameters": {"full_attention": rope_of(file, head_dim), "sliding_attention": local},
            }
        case "phi3":
            original = file.own("rope.scaling.original_context_length", file.needed("context_length"))
            window = file.own("attention.sliding_window")
            return {
                "sliding_window": int(window) if window else None,
                "original_max_position_embeddings": int(original),
            }
        case _:
            return {}


def _windows(file: GgufFile, usual_window: int, usual_period: int) -> dict[str, Any]:
    """Layers that see a window, and every n-th that sees everything."""
    period = int(file.own("attention.sliding_window_pattern", usual_period))
    layers = range(1, int(file.needed("block_count")) + 1)
    return {
        "sliding_window": int(file.own("attention.sliding_window", usual_window)),
        "layer_types": ["sliding_attention" if layer % period else "full_attention" for layer in layers],
    }


def _attention_scale(file: GgufFile, head_dim: int, layers_of_27b: int) -> int:
    """GGUF does not keep it: the size of a head, but at the 27B sizes the width's share of one."""
    if int(file.needed("block_count")) != layers_of_27b:
        return head_dim
    return int(file.needed("embedding_length")) // int(file.needed("attention.head_count"))
