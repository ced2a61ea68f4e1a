"""Does the learner's forward pass on a GPU give the same numbers each time?

    python benchmarks/same_bits.py [--kernels FILE]    also check another version of `learner/kernels.py`

Counts, over many runs of each: (token, head) pairs of which the merge of tree attention's halves is wrong, and tokens
of SmolLM2's shape whose log-probability is not the same in every pass.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from learner import build, make_samples

from palestra.algo.batch import Batch
from palestra.learner import kernels, tree_attention_cuda
from palestra.learner.forward import Scorer
from palestra.learner.micro_batches import pack_batch

SHAPES = [(2400, 9, 64), (8600, 9, 64), (36000, 9, 64), (16000, 16, 128)]  # tokens, heads, their size
MERGES, PASSES = 2000, 30
Merge = Callable[..., None]


def merge_of(file: Path) -> Merge:
    found = importlib.util.spec_from_file_location("other_kernels", file)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    merge: Merge = module.merge
    return merge


def wrong_merges(merge: Merge, tokens: int, heads: int, size: int) -> int:
    """(token, head) pairs that differ from the formula by more than rounding."""
    torch.manual_seed(0)
    first, second = torch.randn(2, tokens, heads, size, device="cuda").bfloat16()
    first_lse, second_lse = torch.randn(2, heads, tokens, device="cuda") * 5
    expected, out, lse = first.clone(), first.clone(), first_lse.clone()
    tree_attention_cuda.merge(expected, first_lse.clone(), second, second_lse)
    wrong = torch.zeros((), dtype=torch.long, device="cuda")
    for _ in range(MERGES):
        out.copy_(first)
        lse.copy_(first_lse)
        merge(out, lse, second, second_lse)
        wrong += (~torch.isclose(out.float(), expected.float(), atol=0.05, rtol=0.02)).any(-1).sum()
    return int(wrong)


def differing_passes(merge: Merge, scorer: Any, groups: int) -> str:
    samples = make_samples(groups, 8, 220, 45, 49152)
    device = torch.device("cuda")
    packed = pack_batch(Batch.of(samples), max_tokens=100_000, share_prefix=True, echo=False, device=device)
    [micro] = packed.micro_batches
    used, tree_attention_cuda._merge = tree_attention_cuda._merge, lambda _: merge  # type: ignore[assignment]
    try:
        with scorer.session(), torch.no_grad():
            passes = torch.stack([scorer(micro)[0] for _ in range(PASSES)])
    finally:
        tree_attention_cuda._merge = used
    apart = (passes - passes.median(0).values).abs()
    differ = int((apart.amax(1) > 0).sum())
    return f"{len(micro.batch.token_ids)} | {differ} of {PASSES} | {int((apart > 0).sum())} | {float(apart.max()):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", type=Path)
    file = parser.parse_args().kernels
    merges = {"as it is": kernels.merge} | ({} if file is None else {str(file): merge_of(file)})
    for shape in SHAPES:
        for name, merge in merges.items():
            print("{} tokens, {} heads of {}:".format(*shape), wrong_merges(merge, *shape), f"wrong ({name})")
    scorer = Scorer(build("135M", torch.bfloat16, "cuda"))
    print("| kernels | tokens | passes that differ | log-probabilities that differ | by at most |\n|" + " --- |" * 5)
    for groups in (8, 16, 32, 64):
        for name, merge in merges.items():
            print(f"| {name} | {differing_passes(merge, scorer, groups)} |", flush=True)


if __name__ == "__main__":
    main()
