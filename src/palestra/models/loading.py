"""Any accepted model name -> model and tokenizer.

>>> canonical_name("litellm/ollama_chat/hf.co/Qwen/Qwen3-0.6B-GGUF:Q8_0")
'Qwen/Qwen3-0.6B'
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from palestra.core.errors import PalestraError
from palestra.models.gguf import SMOLLM2, converted, smollm2_file

TINY = "palestra/tiny"

_ROUTES = re.compile(r"^(litellm/|ollama_chat/|ollama/|https?://|hf\.co/|huggingface\.co/)")
_REMEDY = "Give a local folder with config.json and weights, or use palestra/tiny, which needs no download."


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer: the name it was asked for by, and the folder or hub id it came from."""

    model: Any
    tokenizer: Any
    name: str
    path: str


def canonical_name(name: str) -> str:
    """The name without route prefixes, quantisation tag and `-GGUF`; local paths and .gguf files stay as they are."""
    if name.endswith(".gguf") or Path(name).expanduser().exists():
        return name
    bare = name
    while match := _ROUTES.match(bare):
        bare = bare[match.end() :]
    repository, _, _tag = bare.partition(":")
    return re.sub(r"-GGUF$", "", repository, flags=re.IGNORECASE)


def load_model(name: str, *, dtype: str = "auto", device: str = "auto", quantization: Any | None = None) -> LoadedModel:
    """Load palestra/tiny, palestra/smollm2, a local folder, a .gguf file or a hub id.

    The dtype `auto` is bfloat16 on a GPU, float32 on a CPU.

    `quantization` is a transformers quantisation config (4-bit weights stay where they are put).
    """
    source = canonical_name(name)
    folder = _folder_of(source)
    target = _device_of(device)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _explained(name):
        path, local = (str(folder), True) if folder else (source, False)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=local)
        options = {"quantization_config": quantization, "device_map": {"": target}} if quantization else {}
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=_dtype_of(dtype, target), local_files_only=local, **options
        )
    return LoadedModel(model if quantization else model.to(target), tokenizer, name, path)


def load_tokenizer(name: str) -> Any:
    """The tokenizer alone, of a model that is held elsewhere."""
    source = canonical_name(name)
    folder = _folder_of(source)
    from transformers import AutoTokenizer

    with _explained(name):
        return AutoTokenizer.from_pretrained(str(folder or source), local_files_only=folder is not None)


def _folder_of(source: str) -> Path | None:
    """The local folder that the name means; None for a hub id."""
    if source == TINY:
        return Path(__file__).parent / "tiny"
    if source == SMOLLM2:
        return converted(smollm2_file())
    if source.endswith(".gguf"):
        return converted(Path(source).expanduser())
    if source.startswith("palestra/"):
        raise PalestraError(f"there is no model {source!r}; the ones of that family are {TINY} and {SMOLLM2}")
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists() and not (folder / "adapter_config.json").exists():
            raise PalestraError(f"the folder {folder} has no config.json, so it holds no model. {_REMEDY}")
        return folder
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) or source.startswith("."):
        raise PalestraError(f"there is no folder {source!r}, and it is no hub id such as Qwen/Qwen3-0.6B. {_REMEDY}")
    return None


def _device_of(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except RuntimeError:
        raise PalestraError(f"device={device!r} is unknown; use auto, cpu, cuda or cuda:0") from None
    if target.type == "cuda" and not torch.cuda.is_available():
        raise PalestraError(f"device={device!r}, but no GPU can be used here; use device='auto' or 'cpu'")
    return target


def _dtype_of(dtype: str, device: torch.device) -> torch.dtype:
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in known:
        raise PalestraError(f"dtype={dtype!r} is unknown; use auto, {', '.join(known)}")
    return known[dtype]


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """transformers' failures to find or read a model, as one sentence with a remedy."""
    try:
        yield
    except (OSError, ValueError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise PalestraError(f"the model {name!r} could not be loaded: {first_line} {_REMEDY}") from error
