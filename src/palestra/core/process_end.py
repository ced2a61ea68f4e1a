"""Run the function of a process that ends with it, without the second that freeing torch's modules takes."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable

INTERRUPTED = 130
OBJECTS_UNTIL_COLLECTION = 50_000  # Python's own 700 means a thousand collections while torch is imported: a second


def run_process(function: Callable[[list[str]], int]) -> None:
    """Call the function with the command line's arguments, and exit with the code that it returns."""
    from palestra.core.secrets import hide_environment  # here: `palestra --help` is fast

    status = list[int]()
    atexit.register(_end_process, status)  # the first of all handlers, so the last that runs
    gc.set_threshold(OBJECTS_UNTIL_COLLECTION, *gc.get_threshold()[1:])
    hide_environment()
    status.append(function(sys.argv[1:]))
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))  # a second Ctrl-C: at once, without a traceback
    sys.exit(status[0])


def _end_process(status: list[int]) -> None:
    """End the process as soon as its threads and exit handlers have.

    Not without a status, when a traceback is shown, nor under a debugger or a coverage tool, which come behind this.
    """
    if status and sys.gettrace() is None:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):  # a broken pipe, or none: Python has its own words for that
            return
        os._exit(status[0])
