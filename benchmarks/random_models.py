"""Models of any shape with random weights, whose turns end when one likes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from palestra.plan.shape import ModelShape

TINY = ModelShape(
    hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, feed_forward=128, vocabulary=2048, tied=True, context=40960
)
NEVER = 1e30  # tokens
CONTEXT = 32768  # at least, whatever the shape says


def build_model(shape: ModelShape, device: str, dtype: Any) -> Any:
    """A Qwen3 of this shape, made on the device."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, intermediate_size=shape.feed_forward,
        vocab_size=shape.vocabulary, tie_word_embeddings=shape.tied,
        max_position_embeddings=max(shape.context or 0, CONTEXT),
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def end_turns_after(model: Any, end_ids: Sequence[int], tokens: float, temperature: float) -> None:
    """Make the end tokens as likely as turns of so many tokens on average need, through the weights.

    Channel 0 of the hidden state becomes the same for every token (no layer adds to it), about 1 behind the last norm,
    and is all that the end tokens' logits depend on. The other tokens' logits are measured.
    """
    import torch

    body, head = model.model, model.get_output_embeddings().weight
    with torch.no_grad():
        for layer in body.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        body.embed_tokens.weight[:, 0] = 1.0
        head[:, 0] = 0.0 if head is not body.embed_tokens.weight else 1.0
        ids = torch.randint(0, len(head), (1, 256), generator=torch.Generator().manual_seed(0)).to(head.device)
        body.norm.weight[0] /= body(input_ids=ids).last_hidden_state[..., 0].float().mean()
        hidden = body(input_ids=ids).last_hidden_state[0]  # [256, H]
        logits = (hidden @ head.T).float() / temperature
        logits[:, list(end_ids)] = -math.inf
        wanted = logits.logsumexp(-1).mean().item() - math.log(len(end_ids) * max(tokens - 1, 1e-6))
        head[list(end_ids)] = 0.0
        head[list(end_ids), 0] = temperature * wanted


def save_model(shape: ModelShape, folder: Path, device: str, dtype: Any, tokens: float, temperature: float) -> None:
    """A model folder as a user would have it, with the tokenizer of palestra/tiny."""
    from palestra.models.chat.template import ChatFormat
    from palestra.models.loading import load_tokenizer

    tokenizer = load_tokenizer("palestra/tiny")
    model = build_model(shape, device, dtype)
    end_turns_after(model, ChatFormat(tokenizer).stop_token_ids, tokens, temperature)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
