"""`model.exact` on a GPU: are sampler and learner equal to the bit, and what does it cost?

    python benchmarks/exact_mode.py [--shape 0.6B] [--steps 20] [--lora 16] [--only default]
    python benchmarks/exact_mode.py --shape 8B --only default -- model.master_weights=false   # fits on an H200

A step of a mixture of experts with adapters on attention and experts, on one GPU:

    python benchmarks/exact_mode.py --shape 30B-A3B --steps 2 --lora 16 --targets q_proj k_proj v_proj o_proj experts \\
        --only default --groups 8 --siblings 8 --prompt 350 --micro-batch 8192 --kv-memory-gib 4

Random weights of a Qwen3 or SmolLM2 shape, made on the GPU. Each step samples 64 x 4 replies of up to 64 tokens and
learns from them with random advantages. Differences are between the sampler's and the learner's log-probabilities: of
the first step, in which adapters add nothing yet, and the largest of all steps. Times are of the second half of the
steps; lines that begin with # have those of each step and the peak of memory.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from learner import build
from sampler_gap import sampled

from palestra.algo.batch import Batch
from palestra.algo.step_loss import StepLoss
from palestra.core.config import RunConfig
from palestra.core.config_sections import LoraSection
from palestra.core.types import SamplingParams
from palestra.engine.engine import Engine
from palestra.learner.local import LocalLearner
from palestra.learner.lora import add_lora
from palestra.train.update import objective_of

REPLY = 64
GIB = 1 << 30


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_gib() -> float:
    """The most memory of the GPU that tensors took since the last call."""
    if not torch.cuda.is_available():
        return 0.0
    peak = torch.cuda.max_memory_allocated() / GIB
    torch.cuda.reset_peak_memory_stats()
    return peak


def sample_step(engine: Engine, vocabulary: int, step: int, options: argparse.Namespace) -> Batch:
    draw = np.random.default_rng(step)
    prompts = [draw.integers(3, vocabulary, options.prompt).tolist() for _ in range(options.groups)]
    rows = range(options.groups * options.siblings)
    params = [SamplingParams(int(draw.integers(REPLY // 2, REPLY + 1)), seed=i) for i in rows]
    return sampled(engine, prompts, params, [float(draw.normal()) for _ in rows])


def measure(options: argparse.Namespace, exact: bool, more: dict[str, str]) -> None:
    shape, steps, lora = options.shape, options.steps, options.lora
    settings: dict[str, Any] = {"model.exact": exact, "lora.r": lora, "rollout.temperature": 1.0}
    config = RunConfig.build(settings | {"train.tokens_per_micro_batch": options.micro_batch} | more).with_step_size()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    started = time.perf_counter()
    model: Any = build(shape, torch.bfloat16 if device == "cuda" else torch.float32, device)
    if lora:
        model = add_lora(model, LoraSection(r=lora, target_modules=options.targets))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    print(f"# {total / 1e9:.2f} B weights, {trained / 1e6:.1f} M trained, peak {peak_gib():.1f} GiB", flush=True)
    learner = LocalLearner(model, config=config)
    engine = Engine(model, kv_memory_gib=options.kv_memory_gib, exact=exact, self_check=not options.no_check)
    print(f"# ready after {time.perf_counter() - started:.1f} s, peak {peak_gib():.1f} GiB", flush=True)
    gaps, sample_s, learn_s, tokens = list[tuple[float, ...]](), [], [], []
    for step in range(steps):
        began = time.perf_counter()
        batch = sample_step(engine, model.config.vocab_size, step, options)
        synchronize()
        middle, sample_peak = time.perf_counter(), peak_gib()
        loss = StepLoss.of(batch, objective_of(config), max_completion_length=REPLY)
        outputs = learner.forward_backward(batch, loss)
        learner.optim_step(1e-4 if lora else 1e-5, max_grad_norm=1.0)
        engine.weights_changed(step + 1)
        synchronize()
        sample_s.append(middle - began)
        learn_s.append(time.perf_counter() - middle)
        print(
            f"# step {step}: sampling {sample_s[-1]:.2f} s ({1000 * sample_s[-1] / REPLY:.2f} ms a token step, prompts "
            f"included), update {learn_s[-1]:.2f} s; peak {sample_peak:.1f} and {peak_gib():.1f} GiB",
            flush=True,
        )
        mask = batch.policy_mask
        tokens.append(int(mask.sum()))
        apart = outputs.logprobs()[mask] - batch.logprobs[mask]
        gaps.append((np.abs(apart).mean(), np.abs(apart).max(), (np.exp(apart) - 1 - apart).mean()))
    half = steps // 2
    rate = sum(tokens[half:]) / sum(sample_s[half:])
    name = f"{shape}{f', LoRA r = {lora}' if lora else ''}, {'exact' if exact else 'default'}"
    gap = " | ".join(f"{first:.3g} → {most:.3g}" for first, most in zip(gaps[0], np.max(gaps, axis=0), strict=True))
    print(
        f"| {name} | {gap} | {rate:,.0f} | {1000 * np.median(learn_s[half:]):.0f} ms | "
        f"{np.median(np.add(sample_s, learn_s)[half:]):.3f} s |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6B")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lora", type=int, default=0)
    parser.add_argument("--targets", nargs="+", help="modules with adapters; experts: the stacked weights of a mixture")
    parser.add_argument("--only", choices=("default", "exact"))
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--siblings", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=200, help="tokens")
    parser.add_argument("--micro-batch", type=int, default=16384, help="tokens")
    parser.add_argument("--kv-memory-gib", type=float, default=8)
    parser.add_argument("--no-check", action="store_true", help="leave out the engine's check at load")
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE")
    arguments = parser.parse_args()
    more = dict(word.split("=", 1) for word in arguments.settings)
    print("| model | gap mean | gap max | KL | sampled tokens/s | update | step |\n|" + " --- |" * 7)
    for exact in [False, True][arguments.only == "exact" : 1 if arguments.only == "default" else 2]:
        measure(arguments, exact, more)


if __name__ == "__main__":
    main()
