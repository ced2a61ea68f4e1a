"""Every row of the table of architectures in docs/models.md is what is seen today."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import model_support


def test_the_table_has_all_architectures() -> None:
    assert list(model_support.written_rows()) == list(model_support.NAMES)


@pytest.mark.parametrize("family", model_support.NAMES)
def test_the_table_says_what_works(family: str) -> None:
    assert model_support.written_rows()[family] == model_support.line(model_support.row_of(family))


def test_the_cost_model_counts_the_weights_of_each_architecture() -> None:
    for family in model_support.NAMES:
        model = model_support.tiny_model(family)
        shape = model_support.shape_of(model.config)
        if shape is not None:
            weights = sum(p.numel() for p in model.parameters())
            assert shape.parameters == pytest.approx(weights, rel=0.02), family
