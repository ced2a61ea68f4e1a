"""Kernels compile for a GPU, which takes none: the interpreter takes what the compiler refuses, and has no races."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("triton.backends.nvidia.compiler")

KINDS = {"ARRIVED": "*i32", "IDS": "*i32", "eps": "fp32"}
KINDS |= {
    "STATE": "*fp32",
    "SLOTS": "*i32",
    "LENS": "*i32",
    "COLUMNS": "*i32",
    "FIRSTS": "*i32",
    "ROW_OF": "*i32",
    "q_scale": "fp32",
    "beta_scale": "fp32",
}
KINDS |= dict.fromkeys(["SQUARES", "SUMS", "LSE", "HALF_LSE"], "*fp32")


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
    options = {"num_warps": 4, "num_stages": 5, "launch_pdl": True}
    return str(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


@pytest.fixture
def kernels() -> Any:
    from palestra.engine.cuda import layer_kernels

    if not hasattr(layer_kernels.embed, "arg_names"):
        pytest.skip("Triton's interpreter is on (TRITON_INTERPRET)")
    return layer_kernels


UNGATED = {"BLOCK": 256, "GATED": False}
TILE = {"BM": 64, "BN": 32, "BK": 128}


@pytest.mark.parametrize("gated", [False, True])
def test_a_normed_product_compiles_and_overlaps_its_launch(kernels: Any, gated: bool) -> None:
    shape = {"DEPTH": 1024, "PARTS": 32, "PADDED": 32, "GATED": gated, "OVERLAPS": True}
    ptx = ptx_of(kernels.normed_product, **TILE, **shape)
    assert ptx.index("prefetch.global.L2") < ptx.index("griddepcontrol.wait") < ptx.index("cp.async")
    assert "wgmma" in ptx


@pytest.mark.parametrize("splits", [1, 4])
def test_a_product_that_is_added_compiles_and_overlaps_its_launch(kernels: Any, splits: int) -> None:
    ptx = ptx_of(kernels.added_product, **TILE, DEPTH=1536, SPLITS=splits, OVERLAPS=True)
    assert ptx.index("prefetch.global.L2") < ptx.index("griddepcontrol.wait") < ptx.index("cp.async")
    assert ("atom.global" in ptx) == (splits > 1)


def test_the_embedding_compiles(kernels: Any) -> None:
    assert "st.global" in ptx_of(kernels.embed, WIDTH=576, BLOCK=1024, PARTS=18, PADDED=32)


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
