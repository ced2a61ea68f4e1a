"""Parts of the CPU's learner that have gradients of their own: the plain formula's values and gradients."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from palestra.algo.batching import Tree
from palestra.engine.attention import ModulePatches
from palestra.learner.forward import fast_norms, last_mlp_at
from palestra.learner.masked_attention import Reach, masked_trees
from palestra.learner.tree_attention import Layout, cpu_trees

TREES = (Tree(0, 5, (3, 3, 4, 1)), Tree(16, 0, (6,)), Tree(22, 4, (2, 2)), Tree(30, 3, ()))


@pytest.mark.parametrize("root", [0, 7])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_runs_prompts_and_root_merged_equal_masked_attention(kv_heads: int, root: int) -> None:
    torch.manual_seed(0)
    heads, trees = (4, kv_heads, kv_heads), tuple(replace(tree, start=root + tree.start) for tree in TREES)
    q, k, v = (torch.randn(root + 33, h, 16, dtype=torch.float64, requires_grad=True) for h in heads)
    weight = torch.randn(root + 33, 4, 16, dtype=torch.float64)
    merged = cpu_trees(q, k, v, trees, 0.3, root)
    layout = Layout(trees, q.device, root=root)
    masked = masked_trees(q, k, v, layout, Reach(), {"scale": 0.3, "softcap": None, "sinks": None})
    torch.testing.assert_close(merged, masked)
    ours, plain = (torch.autograd.grad((out * weight).sum(), (q, k, v)) for out in (merged, masked))
    torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("reach", [Reach(), Reach(window=4), Reach(chunk=5)])
def test_rows_behind_a_root_attend_as_whole_rows(reach: Reach) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(17, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    rows = [[*range(9), 9, 10], [*range(9), 11], [*range(6), 12, 13, 14, 15, 16]]  # root 6, prompt 3, lone row of 5
    extra = {"scale": None, "softcap": None, "sinks": None}
    layout = Layout((Tree(6, 3, (2, 1)), Tree(12, 0, (5,))), q.device, root=6)
    found = masked_trees(q, k, v, layout, reach, extra)
    apart = [
        masked_trees(q[row], k[row], v[row], Layout((Tree(0, 0, (len(row),)),), q.device), reach, extra) for row in rows
    ]
    whole = torch.cat([found[row] for row in rows])
    torch.testing.assert_close(whole, torch.cat(apart))
    weight = torch.randn_like(whole)
    ours, plain = (torch.autograd.grad((out * weight).sum(), (q, k, v)) for out in (whole, torch.cat(apart)))
    torch.testing.assert_close(ours, plain)


class PlainRMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def test_norm_with_its_gradient_written_out_equals_the_formula() -> None:
    torch.manual_seed(0)
    norm = PlainRMSNorm(16)
    x, weight = torch.randn(2, 7, 3, 16, requires_grad=True), torch.randn(2, 7, 3, 16)
    expected = norm(x)
    [(_, stand_in)] = fast_norms(norm)
    found = stand_in(x)
    assert type(found.grad_fn).__name__ == "_RmsNormBackward"
    torch.testing.assert_close(found, expected)
    ours, plain = (torch.autograd.grad((y * weight).sum(), (x, norm.weight)) for y in (found, expected))
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x)


def test_last_mlp_gives_what_is_read_and_its_gradient() -> None:
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(1, 10, 4, requires_grad=True)
    source = torch.tensor([2, 3, 3, 7])  # siblings read their prompt's last token each
    weight = torch.randn(4, 4)
    results = []
    for rows in (source, torch.arange(10)):
        with ModulePatches() as patches:
            last_mlp_at([layer], rows, 10, patches)
            read = layer(x)[0].index_select(0, source)
        results.append((read, *torch.autograd.grad((read * weight).sum(), (x, *layer.parameters()))))
    torch.testing.assert_close(*results)
    assert "forward" not in layer.mlp.__dict__


def test_patches_are_undone_in_reverse_also_after_an_error() -> None:
    layer = Layer()
    layer.mlp.eval()
    flags = [module.training for module in layer.modules()]
    config = SimpleNamespace(_attn_implementation="sdpa")
    patches = ModulePatches()
    patches.set(config, "_attn_implementation", "trees")
    for scale in (2.0, 3.0):
        patches.set(layer.mlp, "forward", lambda x, scale=scale: x * scale)
    patches.set_training(layer, False)
    assert layer.mlp(torch.ones(1)).item() == 3.0
    assert not any(module.training for module in layer.modules())
    with pytest.raises(RuntimeError), patches:
        raise RuntimeError
    assert "forward" not in layer.mlp.__dict__
    assert config._attn_implementation == "sdpa"
    assert [module.training for module in layer.modules()] == flags
