"""Several processes that train together: their collectives, and starting them on this machine as torchrun would.

Every rank runs the same program on the same groups and samples, so what is decided from these is decided alike. The
first one alone writes files. `train/ranks.py` has the ranks of torchrun.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from palestra.core.children import ENDING_SIGNALS, end_group, ends_with_parent
from palestra.core.errors import ServiceError, SettingError, UnsupportedError
from palestra.core.files import scratch_root
from palestra.core.secrets import own_environment

T = TypeVar("T")
LAUNCHER = "PALESTRA_LAUNCHER"  # the process that `palestra train --nproc` started the ranks from
RENDEZVOUS = "PALESTRA_RENDEZVOUS"  # the file by which its ranks find each other; ranks of torchrun have none


class RankFailed(ServiceError):
    """The failure of a run over several ranks. All of them have it, so that only the first need report it."""


@dataclass(eq=False)
class Ranks:
    """This process among those that train together. All ranks call the same methods in the same order.

    As it stands it is a process that trains alone: Ctrl-C raises where it arrives, and the collectives are plain calls.
    """

    rank: int = 0
    size: int = 1
    device: Any = None  # the torch device of this rank; None where the config alone decides it
    stop_requested: bool = False  # of this rank; the ranks agree on it when they next gather groups

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files and prints."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """All-gather: the values of all ranks, by rank, on each of them."""
        return [value]

    def from_first(self, work: Callable[[], T]) -> T:
        """Broadcast the result of the first rank; its error is raised on every rank."""
        return work()

    @contextmanager
    def interruptible(self, cancel: Callable[[], None]) -> Iterator[None]:
        """Call `cancel`, in any thread, when this rank is asked to stop or loses another one in the meantime."""
        yield

    @contextmanager
    def guarded(self, on_end: Callable[[str], None]) -> Iterator[None]:
        """All ranks are inside together: if one fails or dies, all end, with its reason.

        Ctrl-C and SIGTERM are remembered until the ranks agree. `on_end` is called with the reason before a rank that
        is stuck is ended.
        """
        yield


ONE_PROCESS = Ranks()


@dataclass(frozen=True, slots=True)
class RankVariables:
    """What torchrun's variables say about this process."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def of_environment(cls) -> RankVariables | None:
        """None for a process that trains alone."""
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if not all(name in os.environ for name in names) or os.environ["WORLD_SIZE"] == "1":
            return None
        try:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            local = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", size))
        except ValueError as error:
            raise SettingError(f"RANK, WORLD_SIZE, … are not numbers ({error}); start with torchrun") from None
        return cls(rank, size, *local)


def is_first_rank() -> bool:
    """Whether this process writes files and prints; also before the ranks have met."""
    place = RankVariables.of_environment()
    return place is None or place.rank == 0


def refuse_ranks(what: str, remedy: str) -> None:
    """PalestraError where several processes would each do by themselves what one should."""
    if place := RankVariables.of_environment():
        raise UnsupportedError(f"{what} runs in one process, and this is one of {place.size} ranks; {remedy}")


_POLL_S = 0.1
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_END_S = 30.0  # the others end by themselves within 10 s after one has; what is left then is killed


def launch_ranks(command: Sequence[str], count: int) -> int:
    """Run the command in `count` processes that are ranks of each other; gives the exit status of the first that
    failed, or 0.

    Ctrl-C, SIGTERM and SIGHUP become a SIGTERM for each of them: they save a checkpoint together.
    The ranks meet in a file that only this user can read, and exchange data over the loopback interface: nothing of
    them can be reached from another machine.
    """
    with tempfile.TemporaryDirectory(prefix="palestra-ranks-", dir=scratch_root()) as folder:
        shared = {name: _LOOPBACK for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")} | own_environment()
        shared |= {LAUNCHER: str(os.getpid()), RENDEZVOUS: str(Path(folder, "rendezvous"))}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # only mark them as ranks, as torchrun does
        shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        environments = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
        prepare = ends_with_parent()
        ranks = [subprocess.Popen(command, env=env, start_new_session=True, preexec_fn=prepare) for env in environments]
        try:
            with _forwarded(ranks):
                return _wait(ranks)
        finally:
            for process in ranks:
                if process.poll() is None:
                    end_group(process.pid)


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    first: tuple[int, int] | None = None  # that failed: its rank and status
    until = float("inf")
    while None in (statuses := [process.poll() for process in ranks]) and time.monotonic() < until:
        if first is None and (failed := [(rank, status) for rank, status in enumerate(statuses) if status]):
            first, until = failed[0], time.monotonic() + _END_S
            if first[1] < 0:
                what = f"rank {first[0]} (process {ranks[first[0]].pid}) was ended by {signal.Signals(-first[1]).name}"
                print(what, file=sys.stderr, flush=True)
        time.sleep(_POLL_S)
    status = first[1] if first else next((status for status in statuses if status), 0)
    return 128 - status if status < 0 else status


@contextmanager
def _forwarded(ranks: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    def forward(number: int, frame: FrameType | None) -> None:
        for process in ranks:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    numbers = [n for n in ENDING_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]  # nohup: SIGHUP
    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, *numbers)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
