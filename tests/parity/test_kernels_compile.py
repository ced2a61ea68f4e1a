"""Kernels compile for a GPU, which takes none: the interpreter takes what the compiler refuses, and has no races."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("triton.backends.nvidia.compiler")

KINDS = {
    "eps": "fp32",
    "STATE": "*fp32",
    "SLOTS": "*i32",
    "LENS": "*i32",
    "COLUMNS": "*i32",
    "FIRSTS": "*i32",
    "ROW_OF": "*i32",
    "q_scale": "fp32",
    "beta_scale": "fp32",
}
KINDS |= dict.fromkeys(["LSE", "HALF_LSE"], "*fp32")


def ptx_of(kernel: Any, **constants: Any) -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    kinds = {name: KINDS.get(name, "*bf16" if name.isupper() else "i32") for name in names}
    kinds |= dict.fromkeys(constants, "constexpr")
    aligned = [i for i, name in enumerate(names) if kinds[name].startswith("*")]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel, kinds, constexprs=constants, attrs=attributes)
    options = {"num_warps": 4, "num_stages": 5}
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


UNGATED = {"BLOCK": 256, "GATED": False}


@pytest.mark.parametrize(
    ("name", "constants"),
    [
        ("delta_rule_step", {"HK": 8, "HV": 16, "DK": 128, "DKP": 128, "DV": 128, "DVP": 128, "RUNS": False}),
        ("delta_rule_step", {"HK": 2, "HV": 2, "DK": 24, "DKP": 32, "DV": 48, "DVP": 64, "RUNS": True}),
        ("mamba_step", {"H": 64, "P": 64, "PP": 64, "N": 128, "NP": 128, "GROUPS": 8, "RUNS": False}),
        ("mamba_step", {"H": 64, "P": 64, "PP": 64, "N": 128, "NP": 128, "GROUPS": 8, "RUNS": True}),
        ("convolution_runs", {"K": 4, "WINDOW": 4, "MAPPED": True, "BIASED": True, "SILU": True, **UNGATED}),
        ("keep_windows", {"WINDOW": 4, "WP": 4, "MAPPED": True, **UNGATED}),
        ("gated_group_norm", {"SIZE": 3072, "BLOCK": 4096}),
        ("gate_heads", {"H": 8, "D": 256, "DP": 256}),
        (
            "convolution_step",
            {"K": 4, "WINDOW": 4, "WP": 4, "BLOCK": 256, "MAPPED": True, "BIASED": True, "SILU": True, "GATED": False},
        ),
        (
            "convolution_step",
            {
                "K": 3,
                "WINDOW": 3,
                "WP": 4,
                "BLOCK": 256,
                "MAPPED": False,
                "BIASED": False,
                "SILU": False,
                "GATED": True,
            },
        ),
    ],
)
def test_steps_of_recurrent_layers_compile(name: str, constants: dict[str, Any]) -> None:
    from palestra.engine.cuda import recurrent_kernels

    kernel = getattr(recurrent_kernels, name)
    if not hasattr(kernel, "arg_names"):
        pytest.skip("Triton's interpreter is on (TRITON_INTERPRET)")
    ptx = ptx_of(kernel, **constants)
    assert "st.global" in ptx
    if name in ("convolution_step", "keep_windows"):  # the window is read before it moves
        assert "bar.sync" in ptx[ptx.rindex("ld.global") :]


def test_merged_halves_are_written_only_when_every_warp_has_read_what_they_overwrite() -> None:
    from palestra.learner import kernels

    if not hasattr(kernels._merge, "arg_names"):
        pytest.skip("Triton's interpreter is on (TRITON_INTERPRET)")
    ptx = ptx_of(kernels._merge, ROWS=32, SIZE=64)
    log_sum_exps = [at for at in range(len(ptx)) if ptx.startswith("ld.global.b32", at)]
    assert len(log_sum_exps) >= 2
    assert max(log_sum_exps) < ptx.index("bar.sync") < ptx.index("st.global")
