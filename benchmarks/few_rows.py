"""A decode step of few rows on a GPU: our five or six kernels a layer beside the library's products.

    PYTHONPATH=src python3 benchmarks/few_rows.py [--all]

Captured steps at a context of 384, random weights, the median of five times 20 replays, in ms. `--all` also runs what
the engine leaves to the library: wider models and more rows.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from palestra.engine.cuda import few_rows
from palestra.engine.cuda.fast_decoder import CudaFastDecoder
from palestra.engine.cuda.paged_ops import DecodePlan

CONTEXT, PAGE = 384, 64
SHAPES: dict[str, tuple[str, dict[str, int]]] = {
    "SmolLM2-135M": ("llama", {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3,
    }),
    "Qwen3-0.6B": ("qwen3", {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    }),
    "Qwen3-1.7B": ("qwen3", {
        "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    }),
}  # fmt: skip
ROWS, MORE_ROWS = (2, 8, 16, 32, 64), (96, 128, 256)


def build(family: str, sizes: dict[str, int]) -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        config = AutoConfig.for_model(family, **sizes, tie_word_embeddings=True, max_position_embeddings=1024)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def plan_for(model: Any, decoder: CudaFastDecoder, rows: int) -> DecodePlan:
    pages = CONTEXT // PAGE
    shape = (model.config.num_hidden_layers, rows * pages, decoder.kv_heads, PAGE, decoder.head_dim)
    keys, values = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    tables = torch.randperm(rows * pages).view(rows, pages).int().cuda()
    return DecodePlan(keys, values, tables, torch.full((rows,), CONTEXT, dtype=torch.int32, device="cuda"))


def step_ms(decoder: CudaFastDecoder, ids: torch.Tensor, plan: DecodePlan) -> tuple[float, torch.Tensor]:
    """Of a captured step; and its logits."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        decoder.decode(ids, plan)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = decoder.decode(ids, plan)
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(20):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 20)
    return sorted(times)[2], logits.float()


@torch.inference_mode()
def main() -> None:
    everything = "--all" in sys.argv
    if everything:
        few_rows.MAX_WIDTH = few_rows.MAX_SIZE = 1 << 20
    for name, (family, sizes) in SHAPES.items():
        if sizes["hidden_size"] > few_rows.MAX_WIDTH:
            continue
        model = build(family, sizes)
        decoder = CudaFastDecoder(model, context=1024)
        few = decoder._few_rows
        assert few is not None, "this needs a GPU of compute capability 9 or more"
        for rows in ROWS + (MORE_ROWS if everything else ()):
            plan = plan_for(model, decoder, rows)
            ids = torch.randint(0, sizes["vocab_size"], (rows,), device="cuda", dtype=torch.int32)
            decoder._few_rows = None
            library_ms, expected = step_ms(decoder, ids, plan)
            decoder._few_rows = few
            ms, logits = step_ms(decoder, ids, plan)
            difference = ((logits - expected).norm() / expected.norm()).item()
            row = {"model": name, "rows": rows, "library_ms": library_ms, "few_rows_ms": ms}
            row |= {"ratio": ms / library_ms, "difference": difference}
            print(json.dumps({key: round(x, 4) if isinstance(x, float) else x for key, x in row.items()}), flush=True)


main()
