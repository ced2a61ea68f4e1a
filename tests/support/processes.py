"""Whether a process has ended."""

import time
from pathlib import Path


def has_ended(pid: int, within_s: float = 60.0) -> bool:
    """Whether a process is gone or a zombie by then."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False
