"""Partial attentions, merged, are the attention over whole tree paths: values and gradients."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from engine_families import tiny_model
from torch import Tensor

from palestra.algo.batching import Tree
from palestra.learner import self_check, tree_attention, tree_attention_cuda
from palestra.learner.forward import Scorer
from palestra.learner.masked_attention import Reach, masked_trees
from palestra.learner.shapes import Shapes
from palestra.learner.tree_attention import Layout
from palestra.learner.tree_attention_cuda import Bounds, flash_trees

TREES = (Tree(0, 5, (3, 4, 1)), Tree(13, 0, (6,)), Tree(19, 4, (2, 2)), Tree(27, 3, ()))
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def behind(root: int) -> tuple[Tree, ...]:
    return tuple(replace(tree, start=root + tree.start) for tree in TREES)


def half(q, k, v, bounds, scale):
    """The formula of what the flash kernel computes for one half."""
    q_bounds, k_bounds, *_, causal, window = bounds
    out, lse = q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    for queries, keys in _segments(q_bounds, k_bounds):
        scores = _scores(q[queries], k[keys], causal, scale, window)
        lse[:, queries] = scores.logsumexp(-1)
        weights = (scores - lse[:, queries, None]).exp()
        out[queries] = (weights @ _heads(v[keys], q.shape[1])).transpose(0, 1).to(q.dtype)
    return out, lse


def half_backward(grad, q, k, v, out, lse, bounds, scale):
    q_bounds, k_bounds, *_, causal, window = bounds
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    for queries, keys in _segments(q_bounds, k_bounds):
        g, heads = grad[queries].transpose(0, 1).float(), q.shape[1]
        weights = (_scores(q[queries], k[keys], causal, scale, window) - lse[:, queries, None]).exp()
        inner = (g * out[queries].transpose(0, 1)).sum(-1, keepdim=True)
        d_scores = weights * (g @ _heads(v[keys], heads).transpose(1, 2) - inner) * scale
        dq[queries] = (d_scores @ _heads(k[keys], heads)).transpose(0, 1).to(q.dtype)
        dk[keys] = _group_sum(d_scores.transpose(1, 2) @ q[queries].transpose(0, 1).float(), k)
        dv[keys] = _group_sum(weights.transpose(1, 2) @ g, v)
    return dq, dk, dv


def _segments(q_bounds: Tensor, k_bounds: Tensor) -> Iterator[tuple[slice, slice]]:
    q, k = q_bounds.tolist(), k_bounds.tolist()
    for i in range(len(q) - 1):
        yield slice(q[i], q[i + 1]), slice(k[i], k[i + 1])


def _heads(x: Tensor, heads: int) -> Tensor:
    """[n, K, D] -> [H, n, D] float32, each key-value head repeated for its queries' heads."""
    return x.transpose(0, 1).float().repeat_interleave(heads // x.shape[1], 0)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float, window: int) -> Tensor:
    scores = q.transpose(0, 1).float() @ _heads(k, q.shape[1]).transpose(1, 2) * scale
    if causal:
        every = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        own = len(k) - len(q)  # the last query's own key is the last one
        hidden = every.triu(own + 1) | every.tril(own - window) if window else every.triu(own + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


def _group_sum(gradient: Tensor, like: Tensor) -> Tensor:
    """[H, n, D] -> [n, K, D]: the heads that share a key-value head, added."""
    return gradient.unflatten(0, (like.shape[1], -1)).sum(1).transpose(0, 1).to(like.dtype)


@pytest.fixture(autouse=True)
def formula_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flash kernels run on GPUs alone; what is tested here is how their two halves are put together."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(tree_attention_cuda, "_half", half)
        monkeypatch.setattr(tree_attention_cuda, "_half_backward", half_backward)


@pytest.mark.parametrize("root", [0, 9, 70])
@pytest.mark.parametrize(
    ("padded", "window", "has_sinks"),
    [
        (False, 0, False),
        (True, 0, False),
        (True, 0, True),
        *((False, n, n % 2 > 0) for n in (0, 1, 2, 3, 4, 7, 10, 80)),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_merged_parts_equal_masked_attention(
    device: str, padded: bool, window: int, has_sinks: bool, root: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_attention_cuda, "SHORTEST_SEGMENT", 8)  # several even for so few tokens
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tokens, heads, kv_heads, size = root + 30, 4, 2, 32
    q, k, v = (
        torch.randn(tokens, h, size, device=device, dtype=dtype, requires_grad=True)
        for h in (heads, kv_heads, kv_heads)
    )
    sinks = torch.randn(heads, device=device, dtype=dtype, requires_grad=True) if has_sinks else None
    weight = torch.randn(tokens, heads, size, device=device, dtype=dtype)
    results = []
    shapes, trees = Shapes(10_000) if padded else None, behind(root)
    bounds, layout = Bounds(trees, q.device, shapes, root), Layout(trees, q.device, root=root)
    assert (bounds.root.stop > 0, bounds.segments > 2) == (root > 0, True)
    for merged in (True, False):
        if merged:
            out = flash_trees(*(x[bounds.order] for x in (q, k, v)), bounds, 0.3, sinks, window)[bounds.place]
        else:
            parts = (layout.reorder(x) for x in (q, k, v))
            extra = {"scale": 0.3, "softcap": None, "sinks": sinks}
            out = layout.restore(masked_trees(*parts, layout, Reach(window or None), extra))
        grads = torch.autograd.grad((out * weight).sum(), (q, k, v) if sinks is None else (q, k, v, sinks))
        results.append((out.detach(), *grads))
    tolerance = 1e-5 if device == "cpu" else 5e-2
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("seed", range(20))
def test_padding_is_seen_by_itself_alone(seed: int) -> None:
    rng = random.Random(seed)
    root = rng.choice([0, rng.randint(1, 2000)])
    trees, start = [], root
    for _ in range(rng.randint(1, 40)):
        prompt = rng.choice([0, 0, rng.randint(1, 300)])
        tree = Tree(start, prompt, tuple(rng.randint(1, 400) for _ in range(rng.randint(0 if prompt else 1, 9))))
        trees.append(tree)
        start += tree.length
    bounds = Bounds(tuple(trees), torch.device("cpu"), Shapes(100_000), root)
    assert bounds.shape is not None
    plain = Bounds(tuple(trees), torch.device("cpu"), root=root)
    assert bounds.order[bounds.place].tolist() == list(range(start))
    assert start <= len(bounds.order) <= 1.8 * start + 4 * 128 + 64
    own, queries, keys, *to_root = (numbers.tolist() for numbers in bounds.numbers)
    assert own[-1] == len(bounds.order)
    assert (queries[-1], keys[-1]) == (
        bounds.completions.stop - bounds.completions.start,
        bounds.prompts.stop - bounds.prompts.start,
    )
    if root:
        assert bounds.place[:root].tolist() == list(range(root))
        assert (to_root[0][-1], to_root[1][-1]) == (
            len(bounds.order) - bounds.root.stop,
            bounds.segments * bounds.root.stop,
        )
        attended = [(d - c) for (a, b), (c, d) in zip(*map(pairwise, to_root), strict=True) if b > a]
        assert attended == [root] * bounds.segments
    for lengths, longest in zip(map(pairwise, (own, queries, keys, *to_root)), bounds.longest, strict=True):
        assert all(0 <= b - a <= longest for a, b in lengths)
    for (a, b), (c, d) in zip(pairwise(queries), pairwise(keys), strict=True):
        assert d > c or a == b  # a query without a key has no softmax
    for half, other in ((bounds.numbers[0], plain.numbers[0]), (bounds.numbers[1], plain.numbers[1])):
        runs, known = ([b - a for a, b in pairwise(numbers.tolist())] for numbers in (half, other))
        assert len(half) >= len(other)
        assert not Counter(known) - Counter(runs)


def test_a_shape_serves_other_layouts() -> None:
    layouts = [(Tree(0, 200 + n, (40, 50 + n, 60)), Tree(350 + 2 * n, 210, (30, 30))) for n in range(20)]
    shapes = Shapes(2000)
    bounds = [Bounds(trees, torch.device("cpu"), shapes) for trees in layouts]
    assert len({some.shape for some in bounds}) == 1
    assert {tuple(len(numbers) for numbers in some.numbers) for some in bounds} == {(17, 9, 9)}
    [lone, too_large] = (Bounds((Tree(0, 0, (n,)),), torch.device("cpu"), shapes) for n in (100, 2001))
    assert lone.shape not in (None, bounds[0].shape)
    assert too_large.shape is None


def test_a_shape_with_a_root_serves_roots_of_other_lengths_but_no_layout_without_one() -> None:
    shapes, cpu = Shapes(4000), torch.device("cpu")
    bounds = [Bounds((Tree(n, 30, (40, 50)), Tree(n + 120, 0, (60,))), cpu, shapes, n) for n in range(300, 250, -5)]
    assert len({some.shape for some in bounds}) == 1
    assert len({(*map(len, some.numbers), *some.longest) for some in bounds}) == 1
    plain = Bounds((Tree(0, 30, (40, 50)), Tree(120, 0, (60,))), cpu, shapes)
    assert plain.shape not in (None, bounds[0].shape)
    assert len(plain.numbers) == 3
    restored = Shapes(4000)
    restored.restore(shapes.state())
    assert restored.state() == shapes.state()
    restored.restore([numbers[:8] for numbers in shapes.state()[1:]])  # of a version without roots
    assert restored.state() == shapes.state()[1:]


def test_the_operator_is_registered_as_compilers_need_it() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(39, h, 8, requires_grad=True) for h in (4, 2, 2))
    bounds, sinks = Bounds(behind(9), q.device, root=9), [torch.randn(4, requires_grad=True)]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for arguments in ((q, k, v, [], bounds.handle, 0.3, 0), (q, k, v, sinks, bounds.handle, 0.3, 7)):
        torch.library.opcheck(torch.ops.palestra.tree_attention.default, arguments, test_utils=checks)


@pytest.mark.skipif(torch.cuda.is_available(), reason="float32 on a GPU is not computed by flash attention")
@pytest.mark.parametrize(
    ("family", "attends"),
    [
        ("llama", {(0, False)}),
        ("deepseek_v3", {(0, False)}),
        ("gemma3_text", {(7, False)}),
        ("gpt_oss", {(0, True), (7, True)}),
    ],
)
def test_prompts_computed_first_give_the_models_own_numbers(
    family: str, attends: set[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = set()

    def noted(*arguments: Any) -> Tensor:
        found.add((arguments[6], arguments[5] is not None))
        return flash_trees(*arguments)

    monkeypatch.setattr(tree_attention, "flash_trees", noted)
    monkeypatch.setattr(tree_attention, "flash_fits", lambda q, v: True)
    monkeypatch.setattr(Layout, "is_reordered", property(lambda layout: layout.bounds.has_shared))
    scorer = Scorer(tiny_model(family))  # compares log-probabilities and gradients with the model's own
    assert (scorer.mode, caplog.text) == ("trees", "")
    assert found == attends
    reordered = Layout(TREES, torch.device("cpu")).reorder(torch.arange(30)).tolist()
    assert reordered == [*range(5), *range(19, 23), *range(5, 13), *range(23, 27), *range(13, 19), *range(27, 30)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU has no other way")
def test_windows_that_a_kernel_gets_wrong_are_computed_with_masks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(self_check, "_settings", lambda scorer: [(False, True), (False, False)])
    monkeypatch.setattr(tree_attention, "flash_fits", lambda q, v: True)
    right = Bounds.within
    monkeypatch.setattr(Bounds, "within", lambda bounds, window: right(bounds, window + 3))
    scorer = Scorer(tiny_model("gemma3_text"))
    assert (scorer.mode, scorer.flash_windows) == ("trees", False)
    assert "masks in the place of sliding windows" in caplog.text
