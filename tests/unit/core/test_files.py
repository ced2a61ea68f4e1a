"""Atomic files and the cache folder."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from palestra.core.files import cache_folder, filter_jsonl, read_jsonl, replacing, write_text


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


def test_an_error_while_writing_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def fail_halfway() -> None:
        with replacing(path) as partial:
            partial.write_text("half of the new")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_is_replaced_when_writing_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    write_text(path, "new")
    assert path.read_text() == "new"
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
