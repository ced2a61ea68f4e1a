"""The gated delta rule over chunks: the recurrence it stands for, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from palestra.engine import recurrences
from palestra.engine.recurrences import chunk_gated_delta_rule

ROWS, HEADS, KEY, VALUE = 2, 3, 8, 12


def token_by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """q and k are normalised."""
    outputs = []
    for t in range(q.shape[1]):
        key = k[:, t, :, :, None]
        state = state * g[:, t, :, None, None].exp()
        new = (v[:, t] - (state * key).sum(-2)) * beta[:, t, :, None]
        state = state + key * new[:, :, None]
        outputs.append((state * q[:, t, :, :, None]).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(outputs, 1), state


def unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + recurrences.EPSILON).rsqrt()


def inputs(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key, value, log decay, beta and state."""
    torch.manual_seed(length)
    sizes = [(ROWS, length, HEADS, n) for n in (KEY, KEY, VALUE)] + [(ROWS, length, HEADS)] * 2
    q, k, v, g, beta, state = (torch.randn(size, dtype=torch.float64) for size in (*sizes, (ROWS, HEADS, KEY, VALUE)))
    made = q, k, v, -torch.nn.functional.softplus(g), beta.sigmoid(), state
    return [x.to(dtype).requires_grad_() for x in made]


@pytest.mark.parametrize("length", [1, 5, 16, 40, 64, 65, 150])
@pytest.mark.parametrize("normalises", [True, False])
def test_chunks_give_the_recurrence_and_its_gradient(length: int, normalises: bool) -> None:
    q, k, v, g, beta, state = arguments = inputs(length)
    norm = unit if normalises else lambda x: x
    expected = token_by_token(norm(q), norm(k), v, g, beta, state)
    options: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": normalises}
    found = chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state, **options)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    weights = [torch.randn_like(x) for x in expected]
    ours, theirs = (torch.autograd.grad(outputs, arguments, weights) for outputs in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_without_a_state_it_begins_at_zero_and_gives_none_unless_asked() -> None:
    q, k, v, g, beta, state = inputs(20, torch.float32)
    out, none = chunk_gated_delta_rule(q, k, v, g, beta)
    assert none is None
    expected, _ = token_by_token(q, k, v, g, beta, torch.zeros_like(state))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_bfloat16_is_computed_in_float32() -> None:
    q, k, v, g, beta, state = inputs(150, torch.bfloat16)
    exact = [x.double().detach() for x in (q, k, v, g, beta, state)]
    expected, _ = token_by_token(unit(exact[0]), unit(exact[1]), *exact[2:])
    out, final = chunk_gated_delta_rule(
        q, k, v, g, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    assert (out.dtype, final.dtype if final is not None else None) == (torch.bfloat16, torch.float32)
    assert float((out.detach().double() - expected).norm() / expected.norm()) < 2**-8  # one rounding


def test_equal_keys_without_decay_stay_exact() -> None:
    """Powers of the chunk's matrix, another way to invert it, would grow to 1e18 here and cancel."""
    q, k, v, _, _, state = inputs(64, torch.float32)
    k = unit(k[:, :1]).expand_as(k)
    g, beta = torch.zeros(ROWS, 64, HEADS), torch.full((ROWS, 64, HEADS), 0.999)
    expected, _ = token_by_token(q, k, v, g, beta, state)
    out, _ = chunk_gated_delta_rule(q, k, v, g, beta, initial_state=state)
    torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-4)
