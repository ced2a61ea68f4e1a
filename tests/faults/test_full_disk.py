"""Exports onto a disk that fills up: what was there stays, and nothing else is left."""

from __future__ import annotations

from pathlib import Path

import pytest
from forkserver import Forkserver


def test_a_disk_that_fills_up_leaves_the_old_file_and_no_other(forkserver: Forkserver, tmp_path: Path) -> None:
    """The system itself refuses to write on: no file may be longer than 200 kB in that process."""
    pytest.importorskip("gguf")
    path = tmp_path / "tiny.gguf"
    path.write_bytes(b"the old one")
    script = f"""
import resource
from pathlib import Path
from palestra.models.gguf.write import write_gguf
from palestra.models.export.source import open_source
from palestra.core.errors import PalestraError
source = open_source("palestra/tiny")
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    write_gguf(source.weights, source.config, source.tokenizer, Path({str(path)!r}))
except PalestraError as error:
    print(error)
"""
    done = forkserver.run("-c", script)
    assert "could not be written" in done.stdout, done.stderr
    assert "choose another path" in done.stdout
    assert path.read_bytes() == b"the old one"
    assert [left.name for left in tmp_path.iterdir()] == ["tiny.gguf"]


def test_a_disk_that_fills_up_leaves_the_old_folder_and_no_other(forkserver: Forkserver, tmp_path: Path) -> None:
    """The system itself refuses to write on: no file may be longer than 200 kB in that process."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "old").touch()
    script = f"""
import resource
from palestra.core.errors import PalestraError
from palestra.models.export.hf import save_hf
from palestra.models.loading import load_model
from pathlib import Path
loaded = load_model("palestra/tiny")
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    save_hf(loaded.model, loaded.tokenizer, Path({str(tmp_path)!r}) / "model")
except PalestraError as error:
    print(error)
"""
    done = forkserver.run("-c", script)
    assert "could not be saved" in done.stdout, done.stderr
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["model", "model/old"]
