"""A checkpoint is a model: it loads, talks and exports, also one that has no tokenizer of its own."""

from pathlib import Path

import pytest

from palestra.core.config import RunConfig
from palestra.core.run_folder import RunFolder
from palestra.core.types import Message
from palestra.learner.local import LocalLearner
from palestra.models.chat.template import ChatFormat
from palestra.models.export.hf import write_tokenizer_and_card
from palestra.models.loading import load_model
from palestra.train.checkpoint import TrainState, save_checkpoint
from palestra.train.setup import with_adapter


@pytest.fixture(params=[0, 4], ids=["full", "lora"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    config = RunConfig.build({"lora.r": request.param})
    loaded = load_model("palestra/tiny", device="cpu")
    model = with_adapter(loaded.model, config)
    learner = LocalLearner(model, config=config, pad_token_id=0)
    run = RunFolder.create(tmp_path, "clerk", config, {"instructions": "Be good."}, at=tmp_path / "clerk-1")

    def write(folder: Path) -> None:
        learner.save(folder)
        write_tokenizer_and_card(model, loaded.tokenizer, folder, run.record)

    return save_checkpoint(run.step_folder(5), TrainState(step=5), write)


@pytest.mark.parametrize("own_tokenizer", [True, False], ids=["new", "of 0.1"])
def test_a_checkpoint_loads_and_talks(checkpoint: Path, own_tokenizer: bool) -> None:
    if not own_tokenizer:
        for path in [*checkpoint.glob("tokenizer*"), *checkpoint.glob("*.jinja")]:
            path.unlink()
    loaded = load_model(str(checkpoint), device="cpu")
    assert len(ChatFormat(loaded.tokenizer).prompt([Message("user", "hi")], []).token_ids) > 0


@pytest.mark.extras
def test_a_checkpoint_exports_under_the_name_of_its_run(checkpoint: Path) -> None:
    from palestra.extras.gguf.source import open_source

    source = open_source(str(checkpoint))
    assert source.name == "clerk-1"
    assert source.instructions == "Be good."
    assert source.weights
