"""Does the cost of a step grow with its tokens and no faster? Rollouts of 1k to 16k tokens, and 8 to 512 of them.

    python benchmarks/linear_cost.py                                 about 2 minutes on an H200
    python benchmarks/linear_cost.py --shape qwen3-8b --lora 16      another shape of random weights
    python benchmarks/linear_cost.py --tiny                          the same script with a tiny model, on a CPU too

Whole steps of a run as `palestra train` takes them (agent loop, engine, learner, records): one to warm up, one that is
measured. A rollout is seven eighths prompt (of its group, as instructions, documents and tool results are) and one
eighth sampled; turns never end before. Micro-batches may have 24,576 tokens, so that the longest groups still share
their prompts.

Expected: time per token falls with more rollouts, as decode steps are shared by more rows. With longer rollouts it
rises by attention's own share, which grows with the length: a token of a rollout of 16k looks back at 8k others on
average, at 4 x heads x head size operations each in a layer, beside 2 x the layer's weights for everything else. The
column `attention` is that ratio of operations to the first row's, and the measured ratio is printed beside its share
of it: at 1.0 the cost is in proportion to the work. `palestra plan` expects a measured ratio of 1.9 for 16k tokens of
the 0.6B shape, where `attention` is 2.8, and of 1.6 for the 8B shape.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from plan import build_run, give_back_memory, settings, warm_up
from random_models import NEVER, TINY, build_model, end_turns_after

from palestra.plan.shape import ModelShape, find_shape

ROW = "row: "
GROUP = 4
LENGTHS, ROLLOUTS = (1024, 2048, 4096, 8192, 16384), (8, 32, 128, 512)
MICRO_BATCH = 24576
PROMPT_SHARE = 7 / 8
ALLOWED = 1.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK")
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--rollouts", type=int, nargs="*", default=ROLLOUTS)
    parser.add_argument("--limit-s", type=int, default=120, help="seconds that one row may take")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    shape = TINY if arguments.tiny else find_shape(arguments.shape)
    lengths, rollouts = ((128, 256), (4, 8)) if arguments.tiny else (arguments.lengths, arguments.rollouts)
    cases = [("length", rollouts[0], n) for n in lengths] + [("rollouts", n, lengths[0]) for n in rollouts]
    rows = measure_all(cases, shape, arguments.lora, arguments.limit_s)
    return report(rows, shape)


def measure_all(cases: list[tuple[str, int, int]], shape: ModelShape, rank: int, limit_s: int) -> list[dict[str, Any]]:
    import torch

    from palestra.models.chat.template import ChatFormat
    from palestra.models.loading import LoadedModel, load_tokenizer

    cuda = torch.cuda.is_available()
    tokenizer = load_tokenizer("palestra/tiny")
    model = build_model(shape, "cuda" if cuda else "cpu", torch.bfloat16 if cuda else torch.float32)
    end_turns_after(model, ChatFormat(tokenizer).stop_token_ids, NEVER, temperature=1.0)
    loaded, learner, rows = LoadedModel(model, tokenizer, "random weights", ""), None, []
    with asyncio.Runner() as runner:
        for kind, rollouts, length in cases:
            give_back_memory()
            row: dict[str, Any] = {"kind": kind, "rollouts": rollouts, "length": length}
            try:
                with time_limit(limit_s):
                    run, found = measure(loaded, learner, shape, rank, rollouts, length, runner)
                row |= found
                learner = run.training.learner
                loaded = LoadedModel(run.backend.model, tokenizer, "random weights", "")
                del run
            except Exception as error:
                traceback.print_exc()
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            rows.append(row)
            print(ROW + json.dumps(row), flush=True)
    return rows


def measure(
    loaded: Any, learner: Any, shape: ModelShape, rank: int, rollouts: int, length: int, runner: asyncio.Runner
) -> tuple[Any, dict[str, Any]]:
    import torch

    cuda, gib = torch.cuda.is_available(), 2**30
    new = length - round(length * PROMPT_SHARE)
    problems = rollouts // GROUP
    kv_tokens = problems * (length - new + GROUP * (new + 64) + 64)
    kv = kv_tokens * shape.kv_numbers * loaded.model.dtype.itemsize * 1.1 / gib
    more = {"train.tokens_per_micro_batch": MICRO_BATCH, "model.kv_memory_gib": max(kv, 0.01)}
    config = settings(rank, problems, GROUP, new, **more)
    began = time.perf_counter()
    run = build_run(loaded, learner, config, length - new, runner, steps=2)
    warm_up(run)
    warm_s = time.perf_counter() - began
    began = time.perf_counter()
    metrics = run.training.step()
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    lengths = run.training.tracker.lengths
    tokens = sum(prompt + sampled for prompt, sampled in lengths)
    phases = {n.removesuffix("_seconds"): round(s, 3) for n, s in metrics.items() if n.endswith("_seconds")}
    return run, {
        "prompt": round(sum(prompt for prompt, _ in lengths) / len(lengths)),
        "sampled": round(sum(sampled for _, sampled in lengths) / len(lengths)),
        "computed": round(metrics.get("tokens_computed", 0)),
        "step_s": round(seconds, 3),
        "sample_s": round(metrics["sample_seconds"], 3),
        "train_s": round(metrics["train_seconds"], 3),
        **{f"{name}_us": 1e6 * value / tokens for name, value in
           (("step", seconds), ("sample", metrics["sample_seconds"]), ("train", metrics["train_seconds"]))},
        "allocated_gib": round(torch.cuda.max_memory_allocated() / gib, 2) if cuda else None,
        "reserved_gib": round(torch.cuda.max_memory_reserved() / gib, 2) if cuda else None,
        "kv_gib": round(kv, 2),
        "warm_up_s": round(warm_s, 1),
        "phases_s": phases,
    }  # fmt: skip


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def over(*_: Any) -> None:
        raise TimeoutError(f"over {seconds} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def operations(shape: ModelShape, length: int) -> float:
    """Of one token's forward pass, in a rollout of this length."""
    return 2.0 * shape.layer_weights + 4.0 * shape.heads * shape.head_dim * length / 2


def report(rows: list[dict[str, Any]], shape: ModelShape) -> int:
    heads = ["rollouts x tokens", "step s", "sampling", "learning", "us a token", "ratio", "sampling", "learning"]
    print("\n| " + " | ".join([*heads, "attention", "ratio / attention", "allocated GiB", "reserved GiB"]) + " |")
    print("| --- " * 12 + "|")
    worst: dict[str, float] = {}
    for kind in ("length", "rollouts"):
        good = [row for row in rows if row["kind"] == kind and "error" not in row]
        for row in (row for row in rows if row["kind"] == kind and "error" in row):
            print(f"| {row['rollouts']} x {row['length']} | {row['error']} |" + " |" * 10)
        for row in good:
            ratios = [row[name] / good[0][name] for name in ("step_us", "sample_us", "train_us")]
            expected = operations(shape, row["length"]) / operations(shape, good[0]["length"])
            worst[kind] = max(worst.get(kind, 0.0), ratios[0])
            worst[f"{kind}, of attention's share"] = max(
                worst.get(f"{kind}, of attention's share", 0.0), ratios[0] / expected
            )
            cells = [f"{row['rollouts']} x {row['length']}", row["step_s"], row["sample_s"], row["train_s"]]
            cells += [f"{row['step_us']:.1f}", *(f"{ratio:.2f}" for ratio in ratios), f"{expected:.2f}"]
            cells += [f"{ratios[0] / expected:.2f}", row["allocated_gib"], row["reserved_gib"]]
            print("| " + " | ".join(map(str, cells)) + " |")
    for name, ratio in worst.items():
        verdict = "within" if ratio <= ALLOWED else "above"
        print(f"{name}: time per token at most {ratio:.2f} x the first row's, {verdict} {ALLOWED} x")
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
