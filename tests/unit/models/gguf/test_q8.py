"""q8_0: whole numbers with a scale by least squares, as llama.cpp reads them."""

from __future__ import annotations

import pytest
import torch

from palestra.models.gguf import q8

gguf = pytest.importorskip("gguf")
KIND = gguf.GGMLQuantizationType.Q8_0


def error(values: torch.Tensor, encoded: object) -> float:
    return float((torch.tensor(gguf.quants.dequantize(encoded, KIND)) - values).norm() / values.norm())


def test_what_is_written_reads_back_closer_than_with_the_usual_scale() -> None:
    torch.manual_seed(0)
    values = torch.randn(40, 96)
    usual = error(values, gguf.quants.quantize(values.numpy(), KIND))
    assert error(values, q8.quantize(values)) < 0.95 * usual < 0.01


def test_weights_from_a_4_bit_file_keep_nearly_all() -> None:
    torch.manual_seed(0)
    lattice = torch.randint(0, 16, (64, 32)) * torch.rand(64, 1) - 4 * torch.rand(64, 1)
    usual = error(lattice, gguf.quants.quantize(lattice.numpy(), KIND))
    assert error(lattice, q8.quantize(lattice)) < 0.8 * usual


def test_a_block_of_nothing_and_an_outlier_stay_finite() -> None:
    values = torch.zeros(2, 32)
    values[1, 3] = 6e4
    found = torch.tensor(gguf.quants.dequantize(q8.quantize(values), KIND))
    assert torch.isfinite(found).all()
    assert torch.equal(found[0], values[0])
    assert abs(found[1, 3] / 6e4 - 1) < 1e-2
