"""Linear layers that the GPU engine runs as one stay what they are for everybody else."""

from __future__ import annotations

from pathlib import Path

import torch

from palestra.core.config import RunConfig
from palestra.engine.cuda.fuse import FusedLinears
from palestra.export.hf import save_hf
from palestra.learner.local import LocalLearner
from palestra.models.loading import load_model


def test_a_model_with_fused_weights_is_saved_whole(tmp_path: Path) -> None:
    loaded = load_model("palestra/tiny")
    expected = {name: weight.clone() for name, weight in loaded.model.state_dict().items()}
    FusedLinears(loaded.model)
    learner = LocalLearner(loaded.model, config=RunConfig.build({}))
    (tmp_path / "checkpoint").mkdir()
    learner.save(tmp_path / "checkpoint")
    save_hf(loaded.model, loaded.tokenizer, tmp_path / "model")

    again = load_model(str(tmp_path / "model")).model
    for name, weight in again.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.zero_()
    learner.load(tmp_path / "checkpoint")
    for name, weight in loaded.model.state_dict().items():
        assert torch.equal(weight, expected[name]), name


def test_fused_weights_follow_an_update_in_place() -> None:
    model = load_model("palestra/tiny").model.eval()
    fused = FusedLinears(model)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
        expected = model(ids).logits
        with fused.use():
            found = model(ids).logits
    assert torch.allclose(found, expected, atol=1e-5)
