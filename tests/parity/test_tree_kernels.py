"""Tree attention's Triton kernel against the formula. Runs in Triton's interpreter, or on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton")

SCRIPT = """
import torch
from palestra.learner import tree_attention_cuda, kernels

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
for dtype, size in ((torch.float32, 8), (torch.bfloat16, 24)):
    whole = torch.randn(50, 3, size, device=device).to(dtype)
    whole_lse = torch.randn(3, 50, device=device) * 5
    half, half_lse = torch.randn(37, 3, size, device=device).to(dtype), torch.randn(3, 37, device=device) * 5
    results = []
    for merge in (tree_attention_cuda.merge, kernels.merge):
        out, lse = whole.clone(), whole_lse.clone()
        merge(out[6:43], lse[:, 6:43], half, half_lse)
        results.append((out, lse))
    for a, b in zip(*results):
        assert torch.allclose(a, b, atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 1e-2), (a - b).abs().max()
        assert not torch.equal(a, whole) and not torch.equal(a, whole_lse)
print("SAME")
"""


def test_merged_halves_are_the_same_by_triton_and_by_the_formula(
    run_kernels: Callable[..., tuple[int, str]],
) -> None:
    status, said = run_kernels(SCRIPT)
    assert status == 0, said[-3000:]
    assert said.endswith("SAME\n")
