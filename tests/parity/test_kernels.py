"""Triton kernels against plain formulas. Runs in Triton's interpreter, or on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton")

DEVICE = """
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
"""
ADAMW = """
from torch import nn
from palestra.core.config_sections import TrainSection
from palestra.learner import kernels
from palestra.learner.optimizer import Optimizer

kernels.BLOCK = 64

def close(a, b, rtol=1e-5):
    assert torch.allclose(a.float(), b.float(), rtol=rtol, atol=1e-7), (a - b).abs().max()

def optimizer(by_kernel):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 7), nn.Linear(7, 30), nn.Linear(3, 3)).to(device, torch.bfloat16)
    made = Optimizer(model, TrainSection(weight_decay=0.1), master_weights=True)
    made.by_kernel = by_kernel
    return model, made

def step(model, made, passes, finite=None):
    for scale in range(1, 1 + passes):  # the third layer has no gradient
        made.accumulate_into_masters()
        inputs = torch.linspace(-scale, scale, 40, device=device).to(torch.bfloat16).view(2, 20)
        model[:2](inputs).square().sum().backward()
    norm = made.clip(0.5)
    made.step(1e-2, finite)
    return norm

def compare(a, b):
    for x, y in zip(a.masters, b.masters):
        close(x, y)
        assert len(a.adamw.state) == len(b.adamw.state)
        for kind, value in a.adamw.state.get(x, {}).items():
            close(value, b.adamw.state[y][kind])
    for x, y in zip(a.weights, a.masters):  # Triton's interpreter cuts where a GPU rounds
        close(x, y.bfloat16(), rtol=0 if device == "cuda" else 2**-7)

(model, ours), (other, theirs) = optimizer(True), optimizer(False)
for passes in (1, 2, 1):
    norms = []
    for m, o in ((model, ours), (other, theirs)):
        for weight, (_, master) in zip(o.weights, o._pairs):
            weight.data.copy_(master)
        norms.append(step(m, o, passes))
    close(*norms)
    compare(ours, theirs)
theirs.load_state_dict(ours.state_dict())
compare(ours, theirs)
before = [x.clone() for x in (*ours.masters, *ours.weights)]
step(model, ours, 1, finite=torch.tensor(False, device=device))
assert all(torch.equal(a, b) for a, b in zip(before, (*ours.masters, *ours.weights)))
assert ours.adamw.state[ours.masters[0]]["step"] == 3
print("SAME")
"""
HEAD = """
from palestra.learner import head, kernels
from palestra.learner.head import LogitRule

kernels.BLOCK = 64
for rule in (LogitRule(), LogitRule(0.5, 3.0, 0.7), LogitRule(2.0, None, 1.3)):
    logits = torch.randn(5, 150, device=device) * 4
    target = torch.randint(0, 150, (5,), device=device)
    expected = head._statistics(logits.clone(), target, rule)
    found = kernels.statistics(logits.clone(), target, rule)
    for a, b in zip(expected, found):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    _, lse, entropy = expected
    grads = torch.randn(2, 5, device=device)
    for more in ((None, None), (entropy, grads[1])):
        a = head._logit_gradient(logits.clone(), target, lse, grads[0], *more, rule)
        b = kernels.logit_gradient(logits.clone(), target, lse, grads[0], *more, rule)
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
print("SAME")
"""
# A draw of 1.0 stands for the worst case of rounding: a target at the end of the cumulative sum.
SAMPLING = """
from palestra.engine.cuda import state as states

states.VOCABULARY_BLOCK = 16
cases = ((40, range(3, 9)), (40, range(16)), (40, range(20, 40)), (12, range(2, 7)), (32, range(32)))
for vocabulary, possible in cases:
    logits = torch.full((4, vocabulary), -float("inf"), device=device)
    logits[:, list(possible)] = torch.randn(4, len(possible), device=device)
    state = states.DecodeState(4, 1, 1, torch.device(device))
    state.left.fill_(1)
    state.temperature.fill_(1.0)
    state.draws.copy_(torch.tensor([[0.0, 0.5, 1.0, 1.0]]))
    state.greedy.copy_(torch.tensor([0, 0, 0, 1]))
    state.stops.fill_(-1)
    state.choose(logits)
    tokens = state.tokens[0].tolist()
    assert all(token in possible for token in tokens), (vocabulary, list(possible), tokens)
    expected = torch.log_softmax(logits, -1).gather(1, state.tokens[0].long()[:, None])[:, 0]
    torch.testing.assert_close(state.logprobs[0], expected)
    assert tokens[3] == int(logits[3].argmax())
print("SAME")
"""
MERGE = """
from palestra.learner import tree_attention_cuda, kernels

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


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(ADAMW, id="updates are those of torch's AdamW"),
        pytest.param(HEAD, id="the head gives what the plain formula gives"),
        pytest.param(SAMPLING, id="a draw at the end of a block chooses a possible token"),
        pytest.param(MERGE, id="merged halves of tree attention are those of the formula"),
    ],
)
def test_kernel(run_kernels: Callable[..., tuple[int, str]], script: str) -> None:
    status, output = run_kernels(DEVICE + script)
    assert status == 0, output[-3000:]
    assert output.endswith("SAME\n")
