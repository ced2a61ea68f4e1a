"""Starting ranks on this machine, as torchrun would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from palestra.core.children import ENDING_SIGNALS, end_group, ends_with_parent
from palestra.core.files import scratch_root
from palestra.core.secrets import own_environment

LAUNCHER = "PALESTRA_LAUNCHER"  # the process that `palestra train --nproc` started the ranks from
RENDEZVOUS = "PALESTRA_RENDEZVOUS"  # the file by which its ranks find each other; ranks of torchrun have none
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
