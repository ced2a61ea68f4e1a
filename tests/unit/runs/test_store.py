"""Run folders: what may be changed of a run that is there."""

from pathlib import Path

import pytest

from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.runs.store import RunFolder


def make(parent: Path, train: dict[str, int]) -> RunFolder:
    return RunFolder.create(parent, "run", RunConfig.build({"train": train}), {})


def test_a_run_gets_longer_and_never_shorter(tmp_path: Path) -> None:
    run = make(tmp_path, {"max_steps": 50})
    run.lengthen(None)
    assert run.config.train.max_steps == 50
    for steps in (50, 7):
        with pytest.raises(PalestraError, match="longer, not shorter"):
            run.lengthen(steps)
    run.lengthen(80)
    assert run.config.train.max_steps == 80


def test_a_run_by_epochs_gets_more_steps_than_it_has_done(tmp_path: Path) -> None:
    run = make(tmp_path, {"epochs": 2})
    for step in (50, 60):
        folder = run.checkpoints / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    with pytest.raises(PalestraError, match="has 60 steps already"):
        run.lengthen(60)
    run.lengthen(61)
    assert run.config.train.max_steps == 61
