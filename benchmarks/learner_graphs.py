"""The learner's small updates as CUDA graphs and launched one by one, in turn in one process, on a GPU.

    python benchmarks/learner_graphs.py [--shape 135M] [--groups 3 4 8 16 24] [--repeats 8] [--lora 8]

Groups of 8 rows like the calculator's. Each update has other lengths, so that one graph serves several layouts. Prints
the median of each way, how long a capture takes, and how far both are apart in log-probabilities and gradient norm.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from learner import SETTINGS, SHAPES, build, learner_for

from palestra.algo.batch import Batch
from palestra.core.config_sections import LoraSection
from palestra.core.types import Sample
from palestra.learner.lora import add_lora
from palestra.train.schedule import coefficients_at
from palestra.train.update import update


def samples_of(groups: int, seed: int, vocabulary: int) -> list[Sample]:
    rng = random.Random(seed)
    samples = []
    for group in range(groups):
        prompt = [rng.randrange(3, vocabulary) for _ in range(rng.randint(205, 225))]
        for sibling in range(8):
            own = [rng.randrange(3, vocabulary) for _ in range(rng.randint(20, 70))]
            size = len(prompt) + len(own)
            trained = (False,) * len(prompt) + (True,) * len(own)
            logprobs = (0.0,) * len(prompt) + (-10.0,) * len(own)
            samples.append(
                Sample((*prompt, *own), trained, (False,) * size, logprobs, sibling / 4 - 0.875, group, len(prompt))
            )
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="135M", choices=SHAPES)
    parser.add_argument("--groups", type=int, nargs="+", default=[3, 4, 8, 16, 24])
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank")
    arguments = parser.parse_args()
    model = build(arguments.shape, torch.bfloat16, "cuda")
    if arguments.lora:
        SETTINGS["lora.r"] = arguments.lora
        model = add_lora(model, LoraSection(r=arguments.lora))
        for name, weight in model.named_parameters():
            if "lora_B" in name:  # zeros at first, of which half of the gradients are zero, too
                torch.nn.init.normal_(weight, std=0.02)
    learner, config = learner_for(model, None)
    graphs: Any = learner._scorer.graphs
    assert graphs is not None
    shapes = learner._shapes
    assert shapes is not None
    print(f"micro-batches of up to {shapes.limit} tokens are captured, padding included")
    # Both ways see the same weights.
    coefficients = replace(coefficients_at(0, config, None, 0.0), learning_rate=0.0)

    def step(samples: list[Sample], *, captured: bool) -> tuple[float, float]:
        learner._shapes = shapes if captured else None
        torch.cuda.synchronize()
        began = time.perf_counter()
        norm = update(learner, samples, config, coefficients, version=0)["grad_norm"]
        torch.cuda.synchronize()
        return time.perf_counter() - began, norm

    def logprobs(samples: list[Sample], *, captured: bool) -> torch.Tensor:
        learner._shapes = shapes if captured else None
        [micro] = learner._pack(Batch.of(samples), echo=False).micro_batches
        with learner._mode(training=True), learner._scorer.session():
            return learner._scorer(micro)[0].detach()

    print(
        "| tokens | captured ms | launched ms | capture ms | logprobs apart | gradient norms | GiB |\n|" + " --- |" * 7
    )
    vocabulary = SHAPES[arguments.shape][-1]
    for groups in arguments.groups:
        batches = [samples_of(groups, seed, vocabulary) for seed in range(arguments.repeats + 2)]
        for way in (True, False):
            step(batches[0], captured=way)
        before, (capture, _) = graphs.captured, step(batches[0], captured=True)
        noted = f"{capture * 1e3:.0f}" if graphs.captured > before else "a known shape, or too large"
        times: dict[bool, list[float]] = {True: [], False: []}
        norms = []
        for batch in batches[2:]:
            pair = [step(batch, captured=way) for way in (True, False)]
            for way, (seconds, _) in zip((True, False), pair, strict=True):
                times[way].append(seconds)
            norms.append(abs(pair[0][1] / pair[1][1] - 1))
        apart = (logprobs(batches[1], captured=True) - logprobs(batches[1], captured=False)).abs()
        tokens = len(learner._pack(Batch.of(batches[1]), echo=False).micro_batches[0].batch.token_ids)
        captured, launched = (statistics.median(times[way]) * 1e3 for way in (True, False))
        print(
            f"| {tokens} | {captured:.1f} | {launched:.1f} | {noted} | {float(apart.max()):.3f}, mean "
            f"{float(apart.mean()):.4f} | {max(norms):.4f} | {torch.cuda.memory_reserved() / 2**30:.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
