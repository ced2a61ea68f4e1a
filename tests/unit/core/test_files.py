"""Files, temporary folders, and values shown to a person."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest

from palestra.core import files as scratch
from palestra.core.files import cache_folder, filter_jsonl, read_jsonl, replacing, write_text
from palestra.core.text import show_seconds, sparkline


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, "/home/ada/.cache/palestra"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/palestra"),
        ({"PALESTRA_CACHE": "/ours", "XDG_CACHE_HOME": "/xdg"}, "/ours"),
        ({"PALESTRA_CACHE": "~/ours"}, "/home/ada/ours"),
    ],
)
def test_the_cache_folder_follows_both_variables_ours_first(
    variables: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    for name in ("PALESTRA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(folder)


def test_a_file_is_replaced_when_writing_has_ended_and_after_an_error_the_old_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "older")
    write_text(path, "old")
    with suppress(RuntimeError), replacing(path) as partial:
        partial.write_text("half of the new")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_records_are_cut_back_without_being_loaded_whole(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text("".join(f'{{"step": {i}, "text": "{"x" * 10_000}"}}\n' for i in range(1000)))
    tracemalloc.start()
    filter_jsonl(path, lambda row: row["step"] < 900)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(1 for _ in read_jsonl(path)) == 900
    assert peak < path.stat().st_size / 10


HOLDER = """
import sys, tempfile, time
from palestra.core.files import scratch_root
print(tempfile.mkdtemp(prefix="palestra-attempt-", dir=scratch_root()), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "_root", None)
    return tmp_path


def start(folder: Path) -> tuple[subprocess.Popen[str], Path]:
    environ = os.environ | {"TMPDIR": str(folder)}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_the_folders_of_a_killed_process_are_removed_by_the_next_one(folder: Path) -> None:
    process, made = start(folder)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert made.is_dir()
    root = scratch.scratch_root()
    assert not made.parent.exists()
    assert list(folder.iterdir()) == [root]


def test_the_folders_of_a_running_process_stay_and_go_with_it(folder: Path) -> None:
    process, made = start(folder)
    scratch.scratch_root()
    assert scratch.remove_stale() == []
    assert made.is_dir()
    process.communicate(timeout=60)  # the end of its stdin is its end
    assert not made.parent.exists()


def test_a_process_has_one_folder_that_others_cannot_list(folder: Path) -> None:
    root = scratch.scratch_root()
    assert scratch.scratch_root() == root
    assert root.stat().st_mode & 0o777 == 0o711
    assert Path(tempfile.mkdtemp(dir=root)).stat().st_mode & 0o777 == 0o700


def test_links_files_and_folders_of_other_users_with_such_names_are_left_alone(folder: Path) -> None:
    precious, other = folder / "precious", folder / "palestra-scratch-other"
    precious.mkdir()
    (folder / "palestra-scratch-link").symlink_to(precious)
    (folder / "palestra-scratch-file").write_text("mine")
    if os.geteuid() == 0:
        other.mkdir()
        os.chown(other, 12345, 12345)
    assert scratch.remove_stale() == []
    assert precious.is_dir()
    assert (folder / "palestra-scratch-file").read_text() == "mine"
    assert other.is_dir() or os.geteuid()


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (65, "1 min 05 s"), (7800, "2 h 10 min")])
def test_seconds_read_well(seconds, text):
    assert show_seconds(seconds) == text


def test_sparkline_averages_down_to_its_width():
    assert sparkline([0.0] * 50 + [1.0] * 50, width=10) == "▁▁▁▁▁█████"
    assert len(sparkline([0.3] * 7, width=60)) == 7
