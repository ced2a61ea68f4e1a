"""Small random models of every family that the engine promises to run."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

COMMON: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA_NET: dict[str, Any] = {  # gated delta nets in three of four layers
    "num_hidden_layers": 4, "head_dim": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
SHARED_KV: dict[str, Any] = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
    "head_dim": 16, "sliding_window": 7, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8,
}  # fmt: skip
LATENT: dict[str, Any] = {  # multi-head latent attention: values are narrower than keys
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}  # fmt: skip
GROUPED_EXPERTS: dict[str, Any] = {
    **EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1
}  # fmt: skip
RECURRENT: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {**EXPERTS, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]},
    "qwen3_next": {**DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": {**DELTA_NET, **EXPERTS, "shared_expert_intermediate_size": 32},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "nemotron_h": {
        "num_hidden_layers": 5, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "chunk_size": 16,
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe", "linear_attention"],
        "n_groups": 2, "head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32, "n_shared_experts": 1,
    },
    "granitemoehybrid": {
        **MAMBA, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128},
    "kimi_linear": {
        **LATENT, **EXPERTS, "num_shared_experts": 1, "first_k_dense_replace": 1,
        "linear_attn_config": {
            "kda_layers": [1, 3], "full_attn_layers": [2], "num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4,
        },
    },
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {"head_dim": 32, **EXPERTS},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mistral": {"sliding_window": 7},
    "gemma2": {"head_dim": 32, "sliding_window": 7, "attn_logit_softcapping": 5.0},
    "gemma3_text": {"head_dim": 32, "sliding_window": 7},
    "phi3": {},
    "olmo2": {},
    "smollm3": {},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "granite": {},
    "gemma3n_text": {**SHARED_KV, "intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.0] * 4},
    "gemma4_text": {**SHARED_KV, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    "gpt_oss": {
        "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "olmo3": {"sliding_window": 7},
    "ministral3": {"head_dim": 16},
    "seed_oss": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "glm4_moe": {**GROUPED_EXPERTS, "head_dim": 16},
    "deepseek_v3": {**LATENT, **GROUPED_EXPERTS},
    "minimax_m2": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {
        "num_hidden_layers": 4, "head_dim": 16, "num_local_experts": 4, "intermediate_size_mlp": 64,
        "attention_chunk_size": 256,
    },
    **RECURRENT,
}  # fmt: skip


def tiny_model(family: str, **changes: Any) -> Any:
    """A random float32 model, its weights scaled up so that its logits differ clearly."""
    extra = {**FAMILIES.get(family, {}), **changes}
    config = AutoConfig.for_model(family, **{**COMMON, **extra})
    torch.manual_seed(0)
    capped = getattr(config, "attn_logit_softcapping", None) is not None  # which sdpa would leave out
    attention = {"attn_implementation": "eager"} if capped else {}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **attention).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    return model
