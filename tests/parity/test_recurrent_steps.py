"""Steps of recurrent layers by our kernels against the module's own forward. Runs in Triton's interpreter, or on
a GPU. Skipped where Triton is not installed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")
RunKernels = Callable[..., tuple[int, str]]

STEPS = """
import json
import sys
import torch
sys.path.insert(0, sys.argv[1])
from engine_families import tiny_model
from palestra.engine.cuda.recurrent_steps import RecurrentStep, StateRows
from palestra.engine.recurrent import RecurrentLayers, Run, StateStore, over_runs, runs_of, state_shape

device = "cuda" if torch.cuda.is_available() else "cpu"
model = tiny_model(sys.argv[2], **json.loads(sys.argv[3]))
torch.manual_seed(1)
with torch.no_grad():
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms, biases and decays
            parameter.add_(torch.randn_like(parameter) * 0.3)
model.to(device)
layers = RecurrentLayers(model)
assert layers
if RecurrentStep.of(layers.modules[0]) is None:
    print("NO STEP")
    sys.exit()
slots = torch.tensor([3, 1, 0, 6, 4], dtype=torch.int32, device=device)
lens = torch.tensor([7, 2, 0, 0, 9], dtype=torch.int32, device=device)  # a padding row, and one that has ended
alive, untouched = lens > 0, [0, 2, 5, 6, 7]
hidden = torch.randn(2, 1, 5, model.config.hidden_size, device=device)
tokens = torch.randn(14, model.config.hidden_size, device=device)

def random_store(shape):
    store = StateStore(shape, 8, lambda *args, **options: torch.zeros(*args, device=device, **options))
    generator = torch.Generator().manual_seed(0)
    for place in shape:
        for state in store.parts(place).values():
            state.copy_(torch.randn(state.shape, generator=generator))
    return store

def apart(x, y):
    return ((x.float() - y.float()).abs().max() / y.float().abs().max()).item()

def compare(dtype, tolerated, tolerated_runs=None):
    model.to(dtype)
    shape = state_shape(model, layers)
    ours, modules = random_store(shape), random_store(shape)
    compute = over_runs(modules, [Run(slots.long(), 1, alive)])
    for place, layer in enumerate(layers.layers[:1]):  # the others are alike
        step = RecurrentStep.of(layer.module)
        before = {part: state.clone() for part, state in ours.parts(place).items()}
        for x in hidden.to(dtype):
            out, expected = step(x[0], ours.parts(place), StateRows(slots, lens)), compute(layer, x)[0]
            assert out.isfinite().all() and out.dtype == dtype
            assert apart(out[alive], expected[alive]) < tolerated, apart(out[alive], expected[alive])
            for part, state in ours.parts(place).items():
                assert apart(state, modules.parts(place)[part]) < tolerated, part
                assert (state[untouched] == before[part][untouched]).all(), part
                assert (state[slots[alive].long()] != before[part][slots[alive].long()]).any(), part
    if tolerated_runs is None:
        return
    counts, starts = [5, 2, 7], [0, 5, 7]  # tokens of rows that continue from states, behind one another
    of_rows = [torch.tensor(x, dtype=torch.int32, device=device) for x in ([3, 1, 4], counts, starts)]
    row_of = torch.arange(3, device=device, dtype=torch.int32).repeat_interleave(of_rows[1])
    compute = over_runs(modules, runs_of([*zip([3, 1, 4], counts)], torch.device(device)))
    for part, state in modules.parts(0).items():  # differences of the steps above would be carried on
        state.copy_(ours.parts(0)[part])
    x = tokens.to(dtype)
    out, expected = step(x, ours.parts(0), StateRows(*of_rows, row_of)), compute(layer, x[None])[0]
    assert apart(out, expected) < tolerated_runs, apart(out, expected)
    for part, state in ours.parts(0).items():
        assert apart(state, modules.parts(0)[part]) < tolerated_runs, part
        assert (state[untouched] == before[part][untouched]).all(), part
with torch.inference_mode():
    compare(torch.float32, 1e-5, 1e-4)
    compare(torch.float16, 0.01)
    compare(torch.bfloat16, 0.06, 0.06)  # the interpreter does not round to it, but cuts off
print("SAME")
"""

FAULT = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
from engine_families import tiny_model
import palestra.engine.engine as engine_module
from palestra.engine import check
from palestra.engine.cuda import paged_ops, recurrent_steps
from palestra.engine.cuda.runner import CudaRunner

heads = {"linear_num_value_heads": 1, "linear_num_key_heads": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
model = tiny_model("qwen3_5_text", **heads, **layers)
model.to("cuda", torch.bfloat16) if torch.cuda.is_available() else model.to(torch.float16)
engine_module.build_runner = CudaRunner
paged_ops.DECODE_PROGRAMS = 1
check.NEW_TOKENS = 4
options = {"page_size": 16, "kv_memory_gib": 0.002, "max_running": 4}
assert engine_module.Engine(model, **options).runner.hybrid_decoder is not None
right = recurrent_steps.convolve
recurrent_steps.convolve = lambda conv, x, state, rows, *more, **flags: right(
    conv, x, state, rows._replace(slots=rows.slots.flip(0)), *more, **flags  # windows of other rows
)
runner = engine_module.Engine(model, **options).runner
assert runner.hybrid_decoder is None and not runner.recurrent_steps
print("SAME")
"""


SLOW = pytest.mark.slow("make test-slow runs every variant")
NORMED = {"mamba_rms_norm": True, "mamba_norm_before_gate": False}
SCALED = {"ssm_in_multiplier": 0.7, "ssm_multipliers": [0.5, 1.5, 0.8, 1.2, 0.6]}
KNOWN = [
    *((family, {}) for family in ("qwen3_5_text", "lfm2", "nemotron_h")),  # one of each kind
    *(pytest.param(family, {}, marks=SLOW) for family in ("qwen3_next", "olmo_hybrid", "granitemoehybrid")),
    pytest.param("olmo_hybrid", {"linear_allow_neg_eigval": False}, marks=SLOW),
    *(pytest.param("falcon_h1", changes, marks=SLOW) for changes in (SCALED, SCALED | NORMED)),
]  # fmt: skip


@pytest.mark.parametrize(("family", "changes"), KNOWN)
def test_steps_equal_the_modules_forward(
    run_kernels: RunKernels, support: str, family: str, changes: dict[str, Any]
) -> None:
    status, output = run_kernels(STEPS, support, family, json.dumps(changes))
    assert status == 0, output[-3000:]
    assert output.endswith("SAME\n")


def test_unknown_recurrent_layers_keep_their_own_forward(run_kernels: RunKernels, support: str) -> None:
    gates_last = NORMED | {"mamba_norm_before_gate": True}
    status, output = run_kernels(STEPS, support, "falcon_h1", json.dumps(gates_last))
    assert status == 0, output[-3000:]
    assert output.endswith("NO STEP\n")


def test_wrong_states_are_noticed_at_load(run_kernels: RunKernels, support: str) -> None:
    status, output = run_kernels(FAULT, support)
    assert status == 0, output[-3000:]
    assert output.endswith("SAME\n")


@pytest.fixture
def support(pytestconfig: pytest.Config) -> str:
    return str(pytestconfig.rootpath / "tests" / "support")
