import json
from pathlib import Path

import pytest

from palestra.core.errors import StorageError, UnreadableFileError
from palestra.core.run_folder import RunFolder, last_checkpoint, step_checkpoints, step_folder
from palestra.train.checkpoint import TrainState, choose_checkpoint, drop_after, prune, read_checkpoint, save_checkpoint


def write_weights(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"w" * 1000)


def save(root: Path, *steps: int) -> Path:
    for step in steps:
        state = TrainState(step=step, source={"cursor": step * 4})
        folder = save_checkpoint(step_folder(root, step), state, write_weights)
    return folder


def test_what_is_saved_is_read_back_and_saving_again_replaces_the_folder(tmp_path: Path) -> None:
    assert read_checkpoint(save(tmp_path, 3)) == TrainState(step=3, source={"cursor": 12})
    save_checkpoint(step_folder(tmp_path, 3), TrainState(step=3, source={"cursor": 99}), write_weights)
    assert read_checkpoint(step_folder(tmp_path, 3)).source == {"cursor": 99}


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "weights.bin").write_bytes(b"x" * 1000), r"weights\.bin is corrupt"),
        (lambda folder: (folder / "weights.bin").unlink(), r"lacks its file weights\.bin"),
        (lambda folder: (folder / "manifest.json").write_text("{"), r"manifest\.json is corrupt"),
    ],
    ids=["corrupt file", "missing file", "corrupt manifest"],
)
def test_a_damaged_checkpoint_is_refused_by_the_name_of_its_file(damage, words, tmp_path) -> None:
    damage(save(tmp_path, 1))
    with pytest.raises(UnreadableFileError, match=words):
        read_checkpoint(step_folder(tmp_path, 1))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"), "Free some space"),
    ],
    ids=["the system's error", "torch's error"],
)
def test_a_full_disk_leaves_the_previous_checkpoint_whole(error: Exception, words: str, tmp_path: Path) -> None:
    save(tmp_path, 1)

    def full(folder: Path) -> None:
        (folder / "weights.bin").write_bytes(b"w" * 10)
        raise error

    with pytest.raises(StorageError, match=words):
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


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4, 5)
    prune(tmp_path, keep_last=2, keep=step_folder(tmp_path, 2))
    assert [p.name for p in step_checkpoints(tmp_path)] == ["step-000002", "step-000004", "step-000005"]


def chosen_step(run: RunFolder, name: str | None, notes: list[str]) -> int | None:
    chosen = choose_checkpoint(run, name, notes.append)
    assert chosen is None or chosen[0] == run.step_folder(chosen[1].step)
    return None if chosen is None else chosen[1].step


def test_the_chosen_checkpoint_or_the_newest_whole_one_is_taken(tmp_path: Path) -> None:
    run, notes = RunFolder(tmp_path), list[str]()
    assert chosen_step(run, None, notes) is None
    save(run.checkpoints, 1, 2, 3)
    assert (chosen_step(run, None, notes), chosen_step(run, "1", notes), notes) == (3, 1, [])
    (run.step_folder(3) / "weights.bin").write_bytes(b"x")
    assert chosen_step(run, None, notes) == 2
    assert notes[0].endswith("(its checksum differs); going on from step-000002, the newest that is whole")
    (run.step_folder(2) / "weights.bin").unlink()
    with pytest.raises(
        UnreadableFileError, match=r"lacks its file weights\.bin; choose another with --from-checkpoint"
    ):
        choose_checkpoint(run, "2", print)
    (run.step_folder(1) / "manifest.json").write_text("[1]")
    with pytest.raises(UnreadableFileError, match="no other is whole, so start a new run"):
        choose_checkpoint(run, None, print)


def test_what_is_later_than_the_chosen_checkpoint_is_dropped(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    save(run.checkpoints, 1, 2, 3)
    (run.step_folder(3) / "manifest.json").unlink()
    run.evals.mkdir()
    for name in ("before", 1, 2, 3):
        run.eval_file(name).write_text("{}")  # type: ignore[arg-type]
    drop_after(run, 1)
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-000001"]
    assert run.eval_names() == ["before", 1]
