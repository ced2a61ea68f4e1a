"""The end of a log, and what is written to it from there on; secrets are redacted."""

from __future__ import annotations

from pathlib import Path

from palestra.core.files import read_from
from palestra.core.secrets import redact

_BLOCK = 1 << 20  # bytes of one read


def recent_lines(path: Path, count: int) -> tuple[list[str], int]:
    """The last whole lines, and where the line after them begins."""
    size = path.stat().st_size if path.is_file() else 0
    start = max(0, size - _BLOCK)
    lines, position = new_lines(path, start)
    return lines[1 if start else 0 :][-count:], position  # the first may have begun before the block


def new_lines(path: Path, position: int, *, ended: bool = False) -> tuple[list[str], int]:
    """The whole lines from a position on, and where the next begins; of a log that has ended, half a line, too."""
    block, position = read_from(path, position, _BLOCK)
    length = len(block) if ended else block.rfind(b"\n") + 1
    text = block[:length].decode("utf-8", "replace").removesuffix("\n")
    return redact(text).split("\n") if length else [], position + length
