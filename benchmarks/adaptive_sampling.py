"""`train.sampling: learnable` against `uniform` on cases of which most teach nothing.

    python benchmarks/adaptive_sampling.py [--seeds 0 1 2] [--tokens 80000] [--share 0.6] [--json FILE]

The demo's shop assistant with palestra/tiny. Of its training cases 30 % are impossible (no answer passes), 40 % trivial
(every answer does) and 30 % the demo's own. `uniform` samples --tokens, `learnable` --share of them; both are then
scored on the demo's held-out cases, none of which is impossible or trivial.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from palestra import EvalSuite, GRPOTrainingResult, demo, fail_reason, measure, pass_reason, train_grpo

CASES = 100
SHARES = {"impossible": 0.3, "trivial": 0.4, "learnable": 0.3}
SETTINGS = {
    "train.problems_per_step": 4,
    "train.max_steps": 10_000,
    "train.learning_rate": 6e-5,  # the demo's 1e-3 learns all of it in a few steps, whatever is sampled
    "train.signal_share": 1.0,  # a step is filled up until its groups have signal, in both arms
    "train.refill_limit": 10,
    "rollout.group_size": 4,
    "rollout.temperature": 1.0,
    "rollout.max_new_tokens": 120,
    "eval.cases": 210,
    "checkpoint.every": 0,
}


@measure
def right_total(ctx: Any) -> Any:
    """As the demo's, but for cases that always pass or never do."""
    kind = ctx.case.row.get("kind", "learnable")
    if kind == "learnable":
        return demo.right_total.fn(ctx)
    return pass_reason("any answer passes") if kind == "trivial" else fail_reason("no answer passes")


def make_suite(seed: int) -> EvalSuite:
    kinds = [kind for kind, share in SHARES.items() for _ in range(round(share * CASES))]
    random.Random(seed).shuffle(kinds)
    cases = demo.make_cases(CASES, held_out=False, seed=1)
    rows = [{**case, "kind": kind} for case, kind in zip(cases, kinds, strict=True)]
    return EvalSuite.from_records(
        rows, input_fn=lambda row: row["question"], expect_fn=lambda row: row["total"], measures=[right_total]
    )


def run(sampling: str, seed: int, tokens: int) -> dict[str, Any]:
    """Train once; its row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        choice = {"train.sampling": sampling, "train.max_sampled_tokens": tokens, "seed": seed, "output_dir": folder}
        result = train_grpo(
            demo.agent, make_suite(seed), held_out=demo.held_out, config={**SETTINGS, **choice}, progress=False
        )
        rows = result.metrics
        signal = sum(row["signal_groups"] for row in rows) / sum(row["groups"] for row in rows)
        return {"sampling": sampling, "seed": seed, "signal": signal, **outcome(result, began)}


def outcome(result: GRPOTrainingResult, began: float) -> dict[str, Any]:
    """Steps, sampled tokens, held-out pass rates and seconds of a training that began at `began`."""
    return {
        "steps": len(result.metrics),
        "sampled_tokens": int(sum(row["sampled_tokens"] for row in result.metrics)),
        "before": result.before.pass_rate.rate,
        "after": result.after.pass_rate.rate,
        "seconds": time.time() - began,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tokens", type=int, default=80_000)
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = []
    for seed in arguments.seeds:
        for sampling, tokens in (("uniform", arguments.tokens), ("learnable", int(arguments.share * arguments.tokens))):
            rows.append(row := run(sampling, seed, tokens))
            print(
                f"{sampling:9} seed {seed}: {row['sampled_tokens']:7,} tokens, {row['steps']} steps, "
                f"{row['signal']:.0%} of groups with signal, held-out {row['before']:.1%} -> {row['after']:.1%}, "
                f"{row['seconds']:.0f} s",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
