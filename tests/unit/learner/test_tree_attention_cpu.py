"""Parts of the CPU's learner that have gradients of their own: the plain formula's values and gradients."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from palestra.algo.batching import Tree
from palestra.learner.patches import FastNorms, ModulePatches, last_mlp_at
from palestra.learner.tree_attention import Layout, Reach, cpu_trees, masked_trees

TREES = (Tree(0, 5, (3, 3, 4, 1)), Tree(16, 0, (6,)), Tree(22, 4, (2, 2)), Tree(30, 3, ()))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_runs_and_prompts_merged_equal_masked_attention(kv_heads: int) -> None:
    torch.manual_seed(0)
    heads = (4, kv_heads, kv_heads)
    q, k, v = (torch.randn(33, h, 16, dtype=torch.float64, requires_grad=True) for h in heads)
    weight = torch.randn(33, 4, 16, dtype=torch.float64)
    merged = cpu_trees(q, k, v, TREES, 0.3)
    layout = Layout(TREES, q.device)
    masked = masked_trees(q, k, v, layout, Reach(), {"scale": 0.3, "softcap": None, "sinks": None})
    torch.testing.assert_close(merged, masked)
    ours, plain = (torch.autograd.grad((out * weight).sum(), (q, k, v)) for out in (merged, masked))
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
    with ModulePatches() as patches:
        FastNorms(norm).use(patches)
        found = norm(x)
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
