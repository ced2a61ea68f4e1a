"""The heavy libraries, loaded where a person sees why nothing else happens."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console


def load_libraries(console: Console, model: str) -> None:
    """Import torch and transformers, and silence their progress bars: ours is enough.

    A model from the hub keeps them, for they show its download.
    """
    with console.status("loading torch and transformers …"):
        from transformers.utils.logging import disable_progress_bar

        import palestra.api  # noqa: F401

    if model.startswith("palestra/") or Path(model).expanduser().exists():
        disable_progress_bar()
