import json
from pathlib import Path

import pytest

from palestra.core.errors import PalestraError
from palestra.core.run_folder import RunFolder
from palestra.train.checkpoint import (
    TrainState,
    choose_checkpoint,
    drop_after,
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


def test_the_newest_whole_checkpoint_is_taken_and_said_so(tmp_path: Path) -> None:
    run, notes = RunFolder(tmp_path), list[str]()
    assert choose_checkpoint(run, None, notes.append) is None
    for step in (1, 2, 3):
        save(run.checkpoints, step)
    assert choose_checkpoint(run, None, notes.append) == (run.step_folder(3), read_checkpoint(run.step_folder(3)))
    assert notes == []
    (run.step_folder(3) / "weights.bin").write_bytes(b"x")
    chosen = choose_checkpoint(run, None, notes.append)
    assert chosen is not None
    assert chosen[1].step == 2
    assert [note.partition(" is corrupt ")[2] for note in notes] == [
        "(its checksum differs); going on from step-000002, the newest that is whole"
    ]


def test_a_checkpoint_that_was_chosen_is_taken_or_refused(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step in (1, 2):
        save(run.checkpoints, step)
    chosen = choose_checkpoint(run, "1", print)
    assert chosen is not None
    assert chosen[1].step == 1
    (run.step_folder(2) / "weights.bin").unlink()
    with pytest.raises(PalestraError, match=r"lacks its file weights\.bin; choose another with --from-checkpoint"):
        choose_checkpoint(run, "2", print)
    (run.step_folder(1) / "manifest.json").write_text("[1]")
    with pytest.raises(PalestraError, match="no other is whole, so start a new run"):
        choose_checkpoint(run, None, print)


def test_what_is_later_than_the_chosen_checkpoint_is_dropped(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for step in (1, 2, 3):
        save(run.checkpoints, step)
    (run.step_folder(3) / "manifest.json").unlink()
    run.evals.mkdir()
    for name in ("before", 1, 2, 3):
        run.eval_file(name).write_text("{}")  # type: ignore[arg-type]
    drop_after(run, 1)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-000001"]
    assert run.eval_names() == ["before", 1]


def test_what_torch_says_of_a_full_disk_is_told_in_one_sentence(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    with pytest.raises(PalestraError, match=r"could not be written .*Free some space"):
        save_checkpoint(step_folder(tmp_path, 2), TrainState(step=2), full)
    assert list(tmp_path.iterdir()) == []
