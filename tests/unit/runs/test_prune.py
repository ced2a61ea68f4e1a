"""Pruning gives disk space back, and takes nothing that is still of use."""

import json
from pathlib import Path

import pytest

from palestra.cli.main import run as palestra
from palestra.core.config import RunConfig
from palestra.core.run_folder import RunFolder
from palestra.runs.index import listed
from palestra.runs.manager import run_garbage
from palestra.runs.processes import hold


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run with four checkpoints, of which the second is the best, one half written, and something in the cache."""
    monkeypatch.setenv("PALESTRA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PALESTRA_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    folder = RunFolder.create(tmp_path, "clerk", RunConfig(), {}, at=tmp_path / "clerk-1")
    for step in (1, 2, 3, 4):
        folder.step_folder(step).mkdir(parents=True)
        (folder.step_folder(step) / "manifest.json").write_text("{}")
        (folder.step_folder(step) / "state.json").write_text(json.dumps({"best_step": 2}))
    (folder.checkpoints / ".step-000005.partial").mkdir()
    (tmp_path / "cache" / "gguf" / "abc-1").mkdir(parents=True)
    (tmp_path / "cache" / "gguf" / "abc-1" / "model.safetensors").write_bytes(b"w" * 2_000_000)
    with listed(folder.path):
        pass
    return folder


def names(run: RunFolder) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


def test_a_dry_run_says_what_and_deletes_nothing(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    before = names(run)
    assert palestra(["runs", "prune", "--dry-run"]) == 0
    out = capsys.readouterr().out
    for words in ("clerk-1/checkpoints/step-000001", "step-000003", "(half written)", "2 MB  cache/gguf/abc-1"):
        assert words in out
    assert out.splitlines()[-1] == "2 MB would be freed"
    assert names(run) == before


@pytest.mark.parametrize("which", [[], ["clerk-1"]], ids=["all", "one run, not the cache"])
def test_the_newest_and_the_best_checkpoint_stay(run: RunFolder, tmp_path: Path, which: list[str]) -> None:
    assert palestra(["runs", "prune", *which, "--yes", "--json"]) == 0
    assert names(run) == ["step-000002", "step-000004"]
    assert list((tmp_path / "cache" / "gguf").iterdir()) == ([tmp_path / "cache" / "gguf" / "abc-1"] if which else [])


def test_nothing_of_a_run_that_is_being_trained_is_garbage(run: RunFolder) -> None:
    with hold(run.path):
        assert list(run_garbage(run)) == []
    assert len(list(run_garbage(run))) == 3
