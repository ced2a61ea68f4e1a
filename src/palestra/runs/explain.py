"""Why a process ended, in the words of its own log."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from palestra.core.files import write_text
from palestra.core.secrets import redact
from palestra.runs.plan import STOP_ORDER, logs

_TAIL_BYTES = 64 * 1024
_MAX_LINES = 8
_MAX_TEXT = 1500
_NAMES = {"api": "the trajectory API", "trainer": "the trainer", "env": "the environment"}
_ERROR = re.compile(r"^(Error: |[\w.]*(Error|Exception|Interrupt)\b.*: )")


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a file; none where there is no file."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, 2)
            file.seek(max(0, end - max(_TAIL_BYTES, 400 * lines)))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [redact(line) for line in text.splitlines()[-lines:]] if lines > 0 else []


def redact_logs(folder: Path) -> None:
    """Once a run's processes have ended. An environment may print what it likes, keys too; the disk names them only."""
    for path in logs(folder, list(STOP_ORDER)).values():
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        if (clean := redact(text)) != text:
            write_text(path, clean)


def why(part: str, exit_code: int, log: Path) -> str:
    """One sentence about the end of a part, then the lines of its log that explain it."""
    name = _NAMES.get(part, part)
    if exit_code < 0:
        how = f"{name} was killed by {_signal_name(-exit_code)}"
        how += "; perhaps the memory was full" if -exit_code == signal.SIGKILL else ""
    else:
        how = f"{name} ended with exit code {exit_code}"
    lines = telling_lines(tail(log, 200)) if exit_code > 0 else []
    text = "\n".join(lines)
    return f"{how}:\n{text[-_MAX_TEXT:]}" if text else how


def telling_lines(lines: list[str]) -> list[str]:
    """From the last line that looks like an error to the end; else the last few."""
    lines = [line.rstrip() for line in lines if line.strip()]
    for i in range(len(lines) - 1, -1, -1):
        if _ERROR.match(lines[i]):
            return lines[i : i + _MAX_LINES]
    return lines[-3:]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
