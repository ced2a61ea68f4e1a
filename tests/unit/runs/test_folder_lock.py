"""The lock of a run folder, also in a folder that somebody else has made."""

import json
import os
from pathlib import Path

import pytest

from palestra.core.errors import StorageError
from palestra.runs.processes import hold, holder


def test_a_lock_that_is_a_link_is_refused_and_its_target_unchanged(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("mine")
    (tmp_path / "run.lock").symlink_to(target)
    with pytest.raises(StorageError, match="symbolic link"), hold(tmp_path):
        pass
    assert holder(tmp_path) is None
    assert target.read_text() == "mine"


def test_a_pipe_or_a_missing_folder_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.lock")
    for folder, words in ((tmp_path, "not a regular file"), (tmp_path / "gone", "cannot be locked")):
        with pytest.raises(StorageError, match=words), hold(folder):
            pass
        assert holder(folder) is None


@pytest.mark.parametrize("content", ["", "[" * 100_000, "7", '{"pid": 1}', "x" * 100_000])
def test_whatever_a_lock_file_holds_it_can_be_taken(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.lock").write_text(content)
    assert holder(tmp_path) is None
    with hold(tmp_path):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
