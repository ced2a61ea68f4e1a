"""`model.exact` on a GPU: are sampler and learner equal to the bit, and what does it cost?

    python benchmarks/exact_mode.py [--shape 0.6B] [--steps 20] [--lora 16] [--only default]
    python benchmarks/exact_mode.py --shape 8B --only default -- model.master_weights=false   # fits on an H200

Random weights of a Qwen3 or SmolLM2 shape. Each step samples 64 x 4 replies of up to 64 tokens and learns from them
with random advantages. Differences are between the sampler's and the learner's log-probabilities: of the first step,
in which adapters add nothing yet, and the largest of all steps.
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

GROUPS, SIBLINGS, PROMPT, REPLY = 64, 4, 200, 64


def sample_step(engine: Engine, vocabulary: int, step: int) -> Batch:
    draw = np.random.default_rng(step)
    prompts = [draw.integers(3, vocabulary, PROMPT).tolist() for _ in range(GROUPS)]
    rows = range(GROUPS * SIBLINGS)
    params = [SamplingParams(int(draw.integers(REPLY // 2, REPLY + 1)), seed=i) for i in rows]
    return sampled(engine, prompts, params, [float(draw.normal()) for _ in rows])


def measure(shape: str, steps: int, lora: int, exact: bool, more: dict[str, str]) -> None:
    settings: dict[str, Any] = {"model.exact": exact, "lora.r": lora, "rollout.temperature": 1.0}
    config = RunConfig.build(settings | {"train.tokens_per_micro_batch": 16384} | more).with_step_size()
    torch.manual_seed(0)
    model: Any = build(shape, torch.bfloat16, "cuda")
    if lora:
        model = add_lora(model, LoraSection(r=lora))
    learner = LocalLearner(model, config=config)
    engine = Engine(model, kv_memory_gib=8, exact=exact)
    gaps, sample_s, learn_s, tokens = list[tuple[float, ...]](), [], [], []
    for step in range(steps):
        began = time.perf_counter()
        batch = sample_step(engine, model.config.vocab_size, step)
        torch.cuda.synchronize()
        middle = time.perf_counter()
        loss = StepLoss.of(batch, objective_of(config), max_completion_length=REPLY)
        outputs = learner.forward_backward(batch, loss)
        learner.optim_step(1e-4 if lora else 1e-5, max_grad_norm=1.0)
        engine.weights_changed(step + 1)
        torch.cuda.synchronize()
        sample_s.append(middle - began)
        learn_s.append(time.perf_counter() - middle)
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
    parser.add_argument("--only", choices=("default", "exact"))
    parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE")
    arguments = parser.parse_args()
    more = dict(word.split("=", 1) for word in arguments.settings)
    print("| model | gap mean | gap max | KL | sampled tokens/s | update | step |\n|" + " --- |" * 7)
    for exact in [False, True][arguments.only == "exact" : 1 if arguments.only == "default" else 2]:
        measure(arguments.shape, arguments.steps, arguments.lora, exact, more)


if __name__ == "__main__":
    main()
