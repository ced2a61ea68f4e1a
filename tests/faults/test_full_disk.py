"""Exports onto a disk that fills up: what was there stays, and nothing else is left."""

from pathlib import Path

import pytest

# The system itself refuses to write on: no file may be longer than 200 kB in that process.
SCRIPT = """
import resource, sys
from pathlib import Path
from palestra.core.errors import PalestraError
from palestra.models.export.hf import save_hf
from palestra.models.loading import load_model
path = Path(sys.argv[1])
loaded = load_model("palestra/tiny")
if path.suffix == ".gguf":
    from palestra.extras.gguf.export import write_gguf
    from palestra.extras.gguf.source import open_source
    source = open_source("palestra/tiny")
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
try:
    if path.suffix == ".gguf":
        write_gguf(source.weights, source.config, source.tokenizer, path)
    else:
        save_hf(loaded.model, loaded.tokenizer, path)
except PalestraError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("name", "old", "words"),
    [
        pytest.param("tiny.gguf", "tiny.gguf", ("could not be written", "choose another path"), id="file"),
        pytest.param("model", "model/old", ("could not be saved",), id="folder"),
    ],
)
def test_a_disk_that_fills_up_leaves_what_was_there_and_nothing_else(forkserver, tmp_path, name, old, words) -> None:
    if name.endswith(".gguf"):
        pytest.importorskip("gguf")
    (tmp_path / old).parent.mkdir(exist_ok=True)
    (tmp_path / old).write_bytes(b"the old one")
    done = forkserver.run("-c", SCRIPT, str(tmp_path / name))
    assert all(word in done.stdout for word in words), done.stderr
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()] == [Path(old)]
    assert (tmp_path / old).read_bytes() == b"the old one"
