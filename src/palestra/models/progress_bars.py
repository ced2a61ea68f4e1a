"""The progress bars of transformers, which show every loading and saving of a small file, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def hidden_progress_bars() -> Iterator[None]:
    """Without them inside; afterwards they are as the user had them."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def is_local(model: str) -> bool:
    """Whether nothing is downloaded for it: then bars say nothing worth knowing."""
    return model.startswith("palestra/") or Path(model).expanduser().exists()
