"""The progress bars of transformers, which show every loading and saving of a small file, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def hidden_progress_bars() -> Iterator[None]:
    """Hide them inside the block, and restore the user's setting afterwards."""
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
