"""What compiled layers keep for the backward pass, tensor by tensor, beside what `palestra plan` counts.

    python benchmarks/activations.py            a minute on a CPU: a narrow Qwen3 of two layers, all weights and LoRA

The compiler divides forward and backward as it does on a GPU, and leaves the operations to torch; attention's kernel is
replaced by one of the same form. The count asserts that the plan is within 2 % of it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from palestra.algo.batch import Batch
from palestra.core.config_sections import LoraSection
from palestra.core.types import Sample
from palestra.learner import forward, patches, tree_attention, tree_attention_cuda
from palestra.learner.forward import Scorer
from palestra.learner.lora import add_lora
from palestra.learner.micro_batches import pack_batch
from palestra.plan.memory import layer_activations
from palestra.plan.shape import shape_of
from palestra.plan.work import StepWork

TOKENS, ROPE = 96, 16
WIDTHS = {"hidden_size": 64, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": ROPE}
NAMES = {64: "a layer's input, or what attention adds to it", 96: "queries, or attention's output", 32: "keys, values",
         160: "gate, up", 6: "log-sum-exps", 4: "adapters, inside"}  # fmt: skip


def without_a_gpu() -> None:
    def half(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return q.clone(), q.new_zeros((q.shape[1], len(q)), dtype=torch.float32)

    def compiled(call: Any) -> Any:
        return torch.compile(call, dynamic=True, backend="aot_eager_decomp_partition")

    tree_attention.flash_fits = lambda q, v: True
    tree_attention_cuda._half = half
    forward.choose_mode = lambda scorer: None
    patches.MAX_RECOMPUTED_COLUMNS = 8  # the model is narrow
    patches._compiled = compiled


def kept_by(model: Any) -> list[Tensor]:
    """The tensors that the layers keep, each once; no weights."""
    scorer = Scorer(model, compile_layers=True)
    mask = [True] * (TOKENS + 1)
    row: Any = ([1] * len(mask), mask, [False] * len(mask), [0.0] * len(mask), 1.0)
    packed = pack_batch(
        Batch.of([Sample(*row)]), max_tokens=999, share_prefix=True, echo=False, device=torch.device("cpu")
    )
    seen = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in seen and x.numel() >= TOKENS:
            seen.add(x.untyped_storage().data_ptr())
            kept.append(x)
        return x

    scorer.model.base_model.norm = torch.nn.Identity()  # the layers alone
    with scorer.session(), torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        scorer._packed_hidden(packed.micro_batches[0])
    return [x for x in kept if x.is_floating_point() and x.numel() != TOKENS * ROPE]  # which all layers share


def main() -> None:
    without_a_gpu()
    for rank in (0, 4):
        config = Qwen3Config(**WIDTHS, num_hidden_layers=2, intermediate_size=160, vocab_size=72)
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        kept = kept_by(add_lora(model, LoraSection(r=rank)) if rank else model)
        shape = shape_of(config)
        assert shape is not None
        sizes = Counter((x.numel() // TOKENS, str(x.dtype).removeprefix("torch."), x.nbytes // TOKENS) for x in kept)
        print(f"{'LoRA' if rank else 'all weights'}: kept for a token by two layers")
        for (width, dtype, size), times in sorted(sizes.items(), key=lambda found: -found[0][2] * found[1]):
            print(f"  {times:3d} x {width:4d} {dtype:9} {times * size:6d} bytes  {NAMES.get(width, '')}")
        found = sum(x.nbytes for x in kept) / TOKENS
        planned = 2 * layer_activations(shape, StepWork(method="lora" if rank else "full", lora_rank=rank or 1))
        print(f"  {found:.0f} bytes, planned {planned:.0f}")
        assert abs(planned / found - 1) < 0.02


if __name__ == "__main__":
    main()
