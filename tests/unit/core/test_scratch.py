"""Temporary folders, also those of processes that were killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from palestra.core import files as scratch

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


def test_links_and_files_with_such_names_are_left_alone(folder: Path) -> None:
    precious = folder / "precious"
    precious.mkdir()
    (folder / "palestra-scratch-link").symlink_to(precious)
    (folder / "palestra-scratch-file").write_text("mine")
    assert scratch.remove_stale() == []
    assert precious.is_dir()
    assert (folder / "palestra-scratch-file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_folders_of_other_users_are_left_alone(folder: Path) -> None:
    other = folder / "palestra-scratch-other"
    other.mkdir()
    os.chown(other, 12345, 12345)
    assert scratch.remove_stale() == []
    assert other.is_dir()
