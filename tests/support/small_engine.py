"""A model that is small and has sharp choices, and what an engine computes of it."""

from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from palestra.engine.engine import Engine

PAGE = 4  # tokens
BYTES_PER_TOKEN = 2 * 2 * 8 * 2 * 4  # layers, heads, dim, key and value, float32


def small_model(vocabulary: int = 96, context: int = 128, seed: int = 0, **sizes: Any) -> Qwen3ForCausalLM:
    """A Qwen3 of a few thousand random weights; `sizes` are those of its config."""
    torch.manual_seed(seed)
    config: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    lengths = {"vocab_size": vocabulary, "max_position_embeddings": context}
    return Qwen3ForCausalLM(Qwen3Config(**(config | lengths | sizes))).eval()


def sharp_model(vocabulary: int, context: int) -> Qwen3ForCausalLM:
    model = small_model(vocabulary, context)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


def engine_of(model: Any, tokens: int = 10_000, **options: Any) -> Engine:
    """With room for the KV of so many tokens."""
    memory = tokens * BYTES_PER_TOKEN / (1 << 30)
    return Engine(model, page_size=PAGE, kv_memory_gib=memory, self_check=False, **options)


def computed_tokens(engine: Engine) -> list[int]:
    """How many tokens each step from here on computes."""
    counts: list[int] = []
    step = engine.runner.step  # type: ignore[attr-defined]

    def counted(chunks: Any) -> Any:
        counts.append(sum(chunk.count for chunk in chunks))
        return step(chunks)

    engine.runner.step = counted  # type: ignore[attr-defined]
    return counts


def own_logprobs(model: Any, ids: list[int], start: int) -> list[float]:
    """Of the tokens from `start` on, by the model's own forward."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, start - 1 : -1]
    found: list[float] = logits.log_softmax(-1).gather(1, torch.tensor(ids[start:])[:, None])[:, 0].tolist()
    return found
