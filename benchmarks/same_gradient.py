"""Is the gradient of one batch the same, to the bit, each time? If not, where does it begin to differ?

    python benchmarks/same_gradient.py [--passes 200] [--eager] [--no-root] [--parallel 2] [--tiny]

The learner of `same_run.py` computes the gradient of one batch many times: all rows begin with the same 385 tokens, in
micro-batches of 8,192. Each pass is compared with the third one, in which CUDA graphs are used already. A line for each
pass that differs names the weights in the order of the backward pass, so that the first one is where to look.
`--eager` captures no graphs, `--no-root` computes the common beginning with every prompt, `--parallel` lets that
many other processes multiply matrices on the GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time

import torch
from learner import SHAPES, build, learner_for, make_samples
from torch import Tensor

from palestra.algo.batch import Batch
from palestra.algo.losses import Objective
from palestra.algo.step_loss import StepLoss
from palestra.core.config import RunConfig
from palestra.learner.local import LocalLearner

REFERENCE = 2  # the number of the pass that others are compared with
MULTIPLIES = """
import torch
x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
while True:
    x = (x @ x).clamp_(-1, 1)
    torch.cuda.synchronize()
"""


def numbers(learner: LocalLearner, batch: Batch, config: RunConfig) -> dict[str, Tensor]:
    """Log-probabilities, then the gradients in the order in which a backward pass makes them."""
    loss = StepLoss.of(batch, Objective(), max_completion_length=config.rollout.max_new_tokens)
    outputs = learner.forward_backward(batch, loss)
    optimizer = learner.optimizer
    optimizer.accumulate_into_masters()
    found = {"log-probabilities": torch.from_numpy(outputs.logprobs()).nan_to_num()}
    for name, weight in reversed([*zip(optimizer.names, optimizer.masters, strict=True)]):
        if weight.grad is not None:
            found[name] = weight.grad.clone()
    learner.discard_gradients()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=200)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--no-root", action="store_true")
    parser.add_argument("--parallel", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on whatever is there")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    shape, groups, beginning = ("tiny", 12, 70) if options.tiny else ("135M", 64, 385)
    model = build(shape, torch.bfloat16 if on_gpu else torch.float32, "cuda" if on_gpu else "cpu")
    learner, config = learner_for(model, 8192)
    if options.eager:
        learner._scorer.graphs = None
    if options.no_root:
        learner._min_root = 0
    batch = Batch.of(make_samples(groups, 8, beginning + 18, 60, SHAPES[shape][-1], beginning))
    others = [subprocess.Popen([sys.executable, "-c", MULTIPLIES]) for _ in range(options.parallel if on_gpu else 0)]
    started, apart = time.perf_counter(), 0
    try:
        expected: dict[str, Tensor] = {}
        for number in range(options.passes):
            found = numbers(learner, batch, config)
            if number == REFERENCE:
                expected = found
            differ = [name for name, x in expected.items() if not torch.equal(x, found[name])]
            if differ:
                apart += 1
                largest = {n: float((expected[n] - found[n]).abs().max()) for n in differ[:3]}
                print(json.dumps({"pass": number, "differ": len(differ), "of": len(expected), "first": largest}))
    finally:
        for process in others:
            process.kill()
            process.wait()
    graphs, micros = learner._scorer.graphs, learner._pack(batch, echo=False)
    summary = {
        "compared": max(0, options.passes - REFERENCE - 1),
        "differ": apart,
        "micro_batches": len(micros),
        "roots": sorted({micro.root for micro in micros}),
        "captured": 0 if graphs is None else graphs.captured,
        "seconds": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
