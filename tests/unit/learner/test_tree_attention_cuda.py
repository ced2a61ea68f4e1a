"""Two partial attentions, merged, are the attention over whole tree paths: values and gradients."""

from __future__ import annotations

import pytest
import torch

from palestra.algo.batching import Tree
from palestra.learner.tree_attention import Layout, masked_trees
from palestra.learner.tree_attention_cuda import Bounds, flash_trees

TREES = (Tree(0, 5, (3, 4, 1)), Tree(13, 0, (6,)), Tree(19, 4, (2, 2)), Tree(27, 3, ()))
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.mark.parametrize("device", DEVICES)
def test_merged_halves_equal_masked_attention(device: str) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tokens, heads, kv_heads, size = 30, 4, 2, 32
    q, k, v = (
        torch.randn(tokens, h, size, device=device, dtype=dtype, requires_grad=True)
        for h in (heads, kv_heads, kv_heads)
    )
    weight = torch.randn(tokens, heads, size, device=device, dtype=dtype)
    results = []
    bounds, layout = Bounds(TREES, q.device), Layout(TREES, q.device)
    for merged in (True, False):
        if merged:
            out = flash_trees(q, k, v, bounds, 0.3)
        else:
            out = masked_trees(q, k, v, layout, None, {"scale": 0.3, "softcap": None, "sinks": None})
        grads = torch.autograd.grad((out * weight).sum(), (q, k, v))
        results.append((out.detach(), *grads))
    tolerance = 1e-5 if device == "cpu" else 5e-2
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_the_operator_is_registered_as_compilers_need_it() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(30, h, 8, requires_grad=True) for h in (4, 2, 2))
    bounds = Bounds(TREES, q.device)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.palestra.tree_attention.default, (q, k, v, bounds.handle, 0.3), test_utils=checks)
