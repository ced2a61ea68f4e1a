"""The policy of `vllm.mode`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from palestra.core.config import RunConfig
from palestra.models.export.hf import save_hf, written_aside
from palestra.policy.base import Policy


def open_policy(model: Any, tokenizer: Any, config: RunConfig) -> Policy[Any]:
    """vLLM with the run's weights: a running one, or one in this process."""
    config.refuse(["rollout.policy_url"], "vLLM samples")
    config.refuse(["model.engine", "model.kv_memory_gib"], "they are those of our engine, and vLLM samples")
    config.refuse(["rollout.constrain_tool_calls"], "vLLM samples without our grammars")
    config.refuse(["lora.load_in_4bit"], "vLLM would sample from a base model that is not in these 4 bits")
    options = config.vllm
    common: dict[str, Any] = {"temperature": config.rollout.temperature, "lora_rank": config.lora.r}
    common["max_staleness"] = config.rollout.max_staleness
    if options.mode == "server":
        from palestra.extras.vllm.server import VllmServerPolicy

        return VllmServerPolicy(
            options.url,
            tokenizer,
            weights_folder=Path(config.rollout.weights_folder),
            **common,
            token=os.environ.get("VLLM_API_KEY"),
            timeout_s=options.timeout_s,
        )
    from palestra.extras.vllm.colocate import VllmColocatePolicy

    config.refuse(["rollout.weights_folder"], "vLLM in this process is given weights from memory")
    with tempfile.TemporaryDirectory() as folder:  # any model that was loaded here, GGUF files and adapters too
        save_base(model, tokenizer, Path(folder) / "model")
        return VllmColocatePolicy(
            str(Path(folder) / "model"),
            tokenizer,
            **common,
            dtype=str(model.dtype).removeprefix("torch."),
            seed=config.seed,
            gpu_memory_utilization=options.gpu_memory_utilization,
            max_model_len=options.max_model_len,
            tensor_parallel_size=options.tensor_parallel_size,
            **({"enable_sleep_mode": True} if config.model.sleep_mode else {}),
            # on a CPU vLLM 0.28 fails at a request with a seed whose prompt is computed in pieces
            **({"enable_chunked_prefill": False, "enforce_eager": True} if model.device.type == "cpu" else {}),
        )


def save_base(model: Any, tokenizer: Any, folder: Path) -> Path:
    """Save the model without its adapter, or as it is where it has none; weights are not copied in memory."""
    if not hasattr(model, "peft_config"):
        return save_hf(model, tokenizer, folder)
    base = model.get_base_model()
    state = base.state_dict().items()  # its layers are wrapped, and the adapter's are inside
    tensors = {name.replace(".base_layer.", "."): tensor for name, tensor in state if ".lora_" not in name}
    with written_aside(folder) as partial:
        base.save_pretrained(partial, state_dict=tensors)
        tokenizer.save_pretrained(partial)
    return folder
