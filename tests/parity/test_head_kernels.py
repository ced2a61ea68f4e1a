"""The head's Triton kernels against the plain formula. Runs in Triton's interpreter, or on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("triton")

SCRIPT = """
import torch
from palestra.learner import head, kernels
from palestra.learner.head import LogitRule

kernels.BLOCK = 64
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
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


def test_the_heads_kernels_give_what_the_plain_formula_gives(run_kernels: Callable[..., tuple[int, str]]) -> None:
    status, said = run_kernels(SCRIPT)
    assert status == 0, said[-3000:]
    assert said.endswith("SAME\n")
