"""The scan of Mamba 2 over chunks: the recurrence it stands for, token by token, and transformers' own code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

from palestra.engine.recurrences import mamba_chunk_scan

ROWS, HEADS, SIZE, GROUPS, STATE = 2, 6, 5, 2, 4
OPTIONS: dict[str, Any] = {"chunk_size": 32, "dt_softplus": True, "return_final_states": True}


def inputs(length: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(length)
    sizes = {
        "hidden_states": (ROWS, length, HEADS, SIZE), "dt": (ROWS, length, HEADS), "A": (HEADS,),
        "B": (ROWS, length, GROUPS, STATE), "C": (ROWS, length, GROUPS, STATE), "D": (HEADS,), "dt_bias": (HEADS,),
        "initial_states": (ROWS, HEADS, SIZE, STATE),
    }  # fmt: skip
    made = {name: torch.randn(size, dtype=torch.float64) for name, size in sizes.items()}
    made["A"] = -made["A"].exp()
    return {name: x.to(dtype).requires_grad_() for name, x in made.items()}


def token_by_token(given: dict[str, Tensor], limit: tuple[float, float]) -> tuple[Tensor, Tensor]:
    x, state = given["hidden_states"], given["initial_states"]
    b, c = (given[name].repeat_interleave(HEADS // GROUPS, 2) for name in "BC")
    dt = F.softplus(given["dt"] + given["dt_bias"]).clamp(*limit)
    outputs = []
    for t in range(x.shape[1]):
        step = dt[:, t, :, None]
        state = state * (step * given["A"][:, None]).exp()[..., None] + (step * x[:, t])[..., None] * b[:, t, :, None]
        outputs.append((state * c[:, t, :, None]).sum(-1) + given["D"][:, None] * x[:, t])
    return torch.stack(outputs, 1), state


@pytest.mark.parametrize("length", [1, 5, 16, 40, 64, 65, 150])
@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.3, 1.5)])
def test_chunks_give_the_recurrence_and_its_gradient(length: int, limit: tuple[float, float]) -> None:
    given = inputs(length)
    expected = token_by_token(given, limit)
    found = mamba_chunk_scan(**given, **OPTIONS, dt_limit=limit)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    weights = [torch.randn_like(x) for x in expected]
    ours, theirs = (torch.autograd.grad(outputs, list(given.values()), weights) for outputs in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("left_out", [(), ("D", "dt_bias", "initial_states")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_gives_what_transformers_gives(dtype: torch.dtype, left_out: tuple[str, ...]) -> None:
    given = {name: x for name, x in inputs(150, dtype).items() if name not in left_out}
    expected, final = mamba2_chunk_scan(**given, **OPTIONS)
    out, state = mamba_chunk_scan(**given, **OPTIONS)
    assert (out.dtype, state.dtype) == (torch.float32, torch.float32)
    torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, final.float(), rtol=1e-4, atol=1e-4)
    alone = mamba_chunk_scan(**given, **OPTIONS | {"return_final_states": False})
    assert isinstance(alone, Tensor)
    assert torch.equal(alone, out)


def test_what_is_never_written_out() -> None:
    """No tensor has a number for each pair of tokens and each number of a state, as transformers' code has."""
    length, largest = 128, 0
    given = inputs(length)

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            largest = max([largest, *(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))])
            return out

    with Watch():
        out, _ = mamba_chunk_scan(**given, **OPTIONS)
        out.sum().backward()
    assert largest <= ROWS * HEADS * length * 64
