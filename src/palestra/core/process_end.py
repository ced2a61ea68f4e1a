"""Run the function of a process that ends with it, without the second that freeing torch's modules takes."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

INTERRUPTED = 130
EXITED_EARLY = 70
OBJECTS_UNTIL_COLLECTION = 50_000  # Python's own 700 means a thousand collections while torch is imported: a second


def run_process(function: Callable[[list[str]], int]) -> None:
    """Call the function with the command line's arguments, and exit with the code that it returns."""
    from palestra.core.secrets import hide_environment  # here: `palestra --help` is fast

    status = list[int]()
    atexit.register(_end_process, status)  # the first of all handlers, so the last that runs
    _report_crashes(status)
    gc.set_threshold(OBJECTS_UNTIL_COLLECTION, *gc.get_threshold()[1:])
    hide_environment()
    status.append(function(sys.argv[1:]))
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))  # a second Ctrl-C: at once, without a traceback
    sys.exit(status[0])


def _end_process(status: list[int]) -> None:
    """End the process without freeing its modules, unless it failed, is debugged, or a tool measures its coverage."""
    if status and sys.gettrace() is None:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):  # a broken pipe, or none: Python has its own words for that
            return
        os._exit(status[0])


def _report_crashes(ended: Sequence[int]) -> None:
    """Say why a crash or user code that calls `os._exit` ends the process, and never exit with 0 for the latter."""
    own, leave = os.getpid(), os._exit

    def leave_early(status: int) -> NoReturn:
        is_ours = str(sys._getframe(1).f_globals.get("__name__")).startswith("palestra.")
        if not (ended or is_ours) and os.getpid() == own:  # a forked child may leave
            os.write(2, f"Error: code in this process called os._exit({status}), which ends it\n".encode())
            status = status or EXITED_EARLY
        leave(status)

    os._exit = leave_early
    faulthandler.enable(all_threads=False)
