"""What a person has of a run: how it reports its progress, and Ctrl-C at a moment when nothing is half done."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from palestra.core.children import ENDING_SIGNALS

log = logging.getLogger("palestra")
_SAME_SIGNAL_S = 0.5
_last_sigterm = float("-inf")


class Watcher:
    """Silent but for warnings; displays override what they show."""

    run_dir: Path | None = None  # the run folder, once there is one
    ends_at_start = False  # with --dry-run, which leaves no run behind

    def started(self, folder: Path) -> None:
        """The run has its folder; whatever happens now, it can be resumed from there."""

    def phase(self, name: str, total: int | None) -> None:
        """A stretch of work begins: `total` rollouts to score or steps to train; None where it is not known."""

    def busy(self, name: str) -> None:
        """Work without a count begins, such as saving the model."""

    def advance(self, done: int, metrics: dict[str, float]) -> None:
        """`done` of the phase's total are finished."""

    def rollout(self) -> None:
        """One more attempt of the step in progress has ended."""

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None:
        """Something that keeps the run from learning. Never silent: without a display it goes to the log."""
        log.warning("%s", text)


class SilentWatcher(Watcher):
    """A watcher for all ranks but the first, which reports for all."""

    def warn(self, text: str) -> None: ...


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during training; a checkpoint of the last whole step is on disk."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(f"interrupted; saved {checkpoint}. Go on with resume={str(checkpoint.parent.parent)!r}")
        self.checkpoint = checkpoint


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back until the block has ended, then let it do what it did before: raise KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        on_ctrl_c(before, None)


def on_ctrl_c(handler: Any, frame: FrameType | None) -> None:
    """What Ctrl-C does by this handler of SIGINT, also where it is ignored, as in the background jobs of a script."""
    if not callable(handler):
        raise KeyboardInterrupt
    handler(signal.SIGINT, frame)


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does at that moment: wait for the end of a step, or cancel sampling; SIGHUP, too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    global _last_sigterm
    if not callable(signal.getsignal(signal.SIGTERM)):  # the outermost of these blocks
        _last_sigterm = float("-inf")

    def stop(number: int, frame: FrameType | None) -> None:
        global _last_sigterm
        last, _last_sigterm = _last_sigterm, time.monotonic()
        # Linux sends one for each thread of a parent that dies; a second Ctrl-C would not wait for the step
        if _last_sigterm - last < _SAME_SIGNAL_S:
            return
        on_ctrl_c(signal.getsignal(signal.SIGINT), frame)

    numbers = [n for n in ENDING_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]  # nohup: SIGHUP
    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
