import json
from pathlib import Path

import pytest

from palestra.core.errors import PalestraError
from palestra.train.checkpoint import (
    TrainState,
    last_checkpoint,
    prune,
    read_checkpoint,
    save_checkpoint,
    step_checkpoints,
    step_folder,
)


def write_weights(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"w" * 1000)


def save(root: Path, step: int) -> Path:
    return save_checkpoint(step_folder(root, step), TrainState(step=step, source={"cursor": step * 4}), write_weights)


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    assert read_checkpoint(save(tmp_path, 3)) == TrainState(step=3, source={"cursor": 12})


def test_a_corrupt_file_is_refused_by_name(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    (folder / "weights.bin").write_bytes(b"x" * 1000)
    with pytest.raises(PalestraError, match=r"weights\.bin is corrupt"):
        read_checkpoint(folder)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    (folder / "weights.bin").unlink()
    with pytest.raises(PalestraError, match=r"lacks its file weights\.bin"):
        read_checkpoint(folder)


def test_a_corrupt_manifest_is_refused_by_name(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(PalestraError, match=r"manifest\.json is corrupt"):
        read_checkpoint(folder)


def test_a_full_disk_leaves_the_previous_checkpoint_whole(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def full(folder: Path) -> None:
        (folder / "weights.bin").write_bytes(b"w" * 10)
        raise OSError(28, "No space left on device")

    with pytest.raises(PalestraError, match="No space left on device"):
        save_checkpoint(step_folder(tmp_path, 2), TrainState(step=2), full)
    assert last_checkpoint(tmp_path) == step_folder(tmp_path, 1)
    assert read_checkpoint(step_folder(tmp_path, 1)).step == 1
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]


def test_a_half_written_checkpoint_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    save(tmp_path, 1)
    half = step_folder(tmp_path, 2)
    half.mkdir()
    (half / "state.json").write_text(json.dumps({"step": 2}))
    assert last_checkpoint(tmp_path) == step_folder(tmp_path, 1)


def test_saving_again_replaces_the_folder(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save_checkpoint(step_folder(tmp_path, 1), TrainState(step=1, source={"cursor": 99}), write_weights)
    assert read_checkpoint(step_folder(tmp_path, 1)).source == {"cursor": 99}


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step)
    prune(tmp_path, keep_last=2, keep=step_folder(tmp_path, 2))
    assert [p.name for p in step_checkpoints(tmp_path)] == ["step-000002", "step-000004", "step-000005"]
