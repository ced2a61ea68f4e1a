"""Names of models, without torch: what a name means, and whether the model can be had."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from palestra.core.errors import NotFoundError, PalestraError, ServiceError
from palestra.core.http import HttpError, Request

TINY, SMOLLM2 = "palestra/tiny", "palestra/smollm2"
REMEDY = (
    "Give a local folder with config.json and weights, or a .gguf file, or use palestra/tiny, which needs no download."
)
_HUB_TIMEOUT_S = 4.0
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_ROUTES = re.compile(r"^(litellm/|ollama_chat/|ollama/|https?://|hf\.co/|huggingface\.co/)")


def canonical_name(name: str) -> str:
    """The name without route prefixes, quantisation tag and `-GGUF`; local paths and .gguf files are unchanged."""
    if name.endswith(".gguf") or Path(name).expanduser().exists():
        return name
    bare = name
    while match := _ROUTES.match(bare):
        bare = bare[match.end() :]
    repository, _, _tag = bare.partition(":")
    return re.sub(r"-GGUF$", "", repository, flags=re.IGNORECASE)


def check_name(source: str) -> None:
    """Raise for a canonical name that is neither embedded nor a hub id."""
    if source.startswith("palestra/") and source not in (TINY, SMOLLM2):
        raise NotFoundError(f"there is no model {source!r}; palestra/ has {TINY} and {SMOLLM2}")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) or source.startswith("."):
        raise NotFoundError(f"there is no folder {source!r}, and it is not a hub id such as Qwen/Qwen3-0.6B. {REMEDY}")


def require_model(name: str) -> None:
    """Raise for a model that cannot be loaded, in a moment: no such file or folder, or a hub that is out of reach."""
    source = canonical_name(name)
    if source in (TINY, SMOLLM2) or Path(source).expanduser().exists():
        return
    if source.endswith(".gguf"):
        raise NotFoundError(f"there is no file {source}. {REMEDY}")
    check_name(source)
    from huggingface_hub import try_to_load_from_cache

    files = ("config.json", "adapter_config.json")
    is_cached = any(isinstance(try_to_load_from_cache(source, file), str) for file in files)
    if not is_cached and (reason := hub_unreachable()):
        raise not_in_cache(name, reason)


def not_in_cache(name: str, reason: str) -> PalestraError:
    return ServiceError(f"the model {name!r} could not be loaded: it is not in the local cache, and {reason}. {REMEDY}")


def hub_unreachable() -> str | None:
    """The reason why the hub cannot be reached, found in seconds instead of by retries; None if it answers."""
    for variable in _OFFLINE:
        if os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE"):
            return f"{variable} is set"
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    results: list[str | None] = []

    def ask() -> None:
        try:
            Request(endpoint, method="HEAD", timeout_s=_HUB_TIMEOUT_S).send()  # an error status is an answer too
            results.append(None)
        except HttpError as error:
            results.append(f"{endpoint} cannot be reached ({error.reason})")

    # in a thread, because a DNS lookup may take longer than the timeout of the request
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_HUB_TIMEOUT_S)
    return results[0] if results else f"{endpoint} does not answer within {_HUB_TIMEOUT_S:g} s"


@contextmanager
def hidden_progress_bars() -> Iterator[None]:
    """Without transformers' progress bars, which show every loading and saving of a small file, too."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def is_local(model: str) -> bool:
    """Whether the model loads without a download, so that progress bars are not needed."""
    return model.startswith("palestra/") or Path(model).expanduser().exists()
