"""A learner's step in shards (FSDP2) beside the one of one process: seconds, memory, and how far their numbers differ.

python benchmarks/fsdp.py                                   # one GPU: what sharding costs by itself (2 minutes)
torchrun --nproc-per-node 4 benchmarks/fsdp.py              # four GPUs (3 minutes)
python benchmarks/fsdp.py --shape tiny                      # any machine, to try it (20 seconds)
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from palestra.algo.batch import Batch
from palestra.algo.losses import Objective
from palestra.algo.step_loss import StepLoss
from palestra.core.config import RunConfig
from palestra.core.ranks import RankVariables
from palestra.core.types import Sample
from palestra.learner.base import Learner
from palestra.learner.fsdp import FsdpLearner
from palestra.learner.local import LocalLearner
from palestra.learner.lora import add_lora
from palestra.train.ranks import TorchRanks, rank_device

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    "0.6b": {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
    "1.7b": {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
}
HEADS = {"tiny": (4, 2, 16), "0.6b": (16, 8, 128), "1.7b": (16, 8, 128)}
STEPS, WARM_UP = 5, 3


def build(shape: str, device: torch.device, config: RunConfig) -> Any:
    heads, kv_heads, head_dim = HEADS[shape]
    torch.manual_seed(0)
    settings = AutoConfig.for_model(
        "qwen3", num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, **SHAPES[shape]
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(settings, dtype=dtype)
    return add_lora(model, config.lora) if config.lora.r else model


def rows(groups: int, siblings: int, tokens: int, vocabulary: int) -> list[Sample]:
    rng = random.Random(0)
    samples = []
    for group in range(groups):
        prompt = [rng.randrange(3, vocabulary) for _ in range(tokens // 4)]
        for sibling in range(siblings):
            own = [rng.randrange(3, vocabulary) for _ in range(tokens - tokens // 4)]
            mask = [False] * len(prompt) + [True] * len(own)
            advantage = sibling / siblings - 0.5
            none = [False] * tokens
            samples.append(Sample(prompt + own, mask, none, [-5.0] * tokens, advantage, group, len(prompt)))  # type: ignore[arg-type]
    return samples


def measure(make: Callable[[], Learner], samples: list[Sample], device: torch.device) -> dict[str, float]:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    learner = make()
    loss = StepLoss.of(Batch.of(samples), Objective(), max_completion_length=len(samples[0].token_ids))
    found: dict[str, float] = {}
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            began = _now(device)
        outputs = learner.forward_backward(Batch.of(samples), loss)
        norm = learner.optim_step(1e-5, max_grad_norm=1.0)
        if step == 1:
            found |= {"loss": outputs.metrics()["loss"], "norm": norm, "entropy": outputs.metrics()["entropy"]}
    found["step_s"] = (_now(device) - began) / STEPS
    began = _now(device)
    learner.weights(1).tensors()
    found["publish_s"] = _now(device) - began
    found["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else float("nan")
    return found


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def ranks_of(place: RankVariables, config: RunConfig) -> Iterator[TorchRanks]:
    """Those of torchrun, or one rank."""
    if "MASTER_PORT" not in os.environ:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "1"}
    ranks = TorchRanks(place, rank_device(place, config), 600.0)
    with ranks.guarded(lambda reason: None):
        yield ranks
    ranks.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.6b" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=0, help="of a row; default 1024, of tiny 64")
    options = parser.parse_args()
    tokens = options.tokens or (64 if options.shape == "tiny" else 1024)
    samples = rows(options.groups, options.siblings, tokens, SHAPES[options.shape]["vocab_size"])
    with ranks_of(RankVariables.of_environment() or RankVariables(0, 1, 0, 1), RunConfig()) as ranks:
        device = ranks.device
        for name, r in (("full", 0), ("lora", 16)):
            config = RunConfig.build({"lora.r": r, "train.tokens_per_micro_batch": 16384})

            def local(config: RunConfig = config) -> Learner:
                return LocalLearner(build(options.shape, device, config), config=config)

            def sharded(config: RunConfig = config) -> Learner:
                return FsdpLearner(build(options.shape, device, config), config=config, ranks=ranks)

            for kind, make in (("one process", local), (f"{ranks.size} rank(s), FSDP2", sharded)):
                found = measure(make, samples, device)
                if ranks.is_first:
                    numbers = "  ".join(f"{key} {value:.6g}" for key, value in found.items())
                    print(f"{options.shape} {name:5} {kind:18} {numbers}", flush=True)


if __name__ == "__main__":
    main()
