"""The optimizer's Triton kernel against torch's AdamW. Runs in Triton's interpreter, or on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton")

SCRIPT = """
import torch
from torch import nn
from palestra.core.config_sections import TrainSection
from palestra.learner import kernels
from palestra.learner.optimizer import Optimizer

kernels.BLOCK = 64
device = "cuda" if torch.cuda.is_available() else "cpu"

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


def test_the_kernels_updates_are_those_of_torchs_adamw(run_kernels: Callable[..., tuple[int, str]]) -> None:
    status, said = run_kernels(SCRIPT)
    assert status == 0, said[-3000:]
    assert said.endswith("SAME\n")
