"""The ranks of torchrun, or of `palestra train --nproc`: how they meet, agree, stop together and end together."""

from __future__ import annotations

import atexit
import datetime
import json
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Optional, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from palestra.core.codec import CodecError, decode, encode
from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError, ResourceError, ServiceError, SettingError, text_of
from palestra.core.ranks import RankFailed, Ranks, RankVariables
from palestra.core.types import Array
from palestra.extras.ranks.launch import LAUNCHER, RENDEZVOUS

log = logging.getLogger("palestra")
T = TypeVar("T")

GRACE_S = 10.0  # in which a rank ends by itself when another one is gone; then it is ended
_JOIN_S = 600.0  # all must have started by then
_POLL_S = 1.0

_joined: TorchRanks | None = None  # torch.distributed is one for a process, too


def join(place: RankVariables, config: RunConfig) -> Ranks:
    """The ranks that this process is one of, which it meets at the first call."""
    global _joined
    if _joined is None:
        _joined = TorchRanks(place, rank_device(place, config), config.ranks.timeout_s)
        atexit.register(_joined.close)
    _joined.agree(config)
    return _joined


def rank_device(place: RankVariables, config: RunConfig) -> torch.device:
    """The GPU of this rank, or the CPU."""
    device = config.model.device
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if device not in ("auto", "cuda"):
        raise SettingError(
            f"model.device = {device!r} is one GPU, and there are {place.size} ranks; leave it at 'auto'"
        )
    if place.local_size > (count := torch.cuda.device_count()):
        raise ResourceError(
            f"{place.local_size} ranks on this machine need as many GPUs, and there are {count}; use --nproc {count}, "
            "or --model.device cpu"
        )
    return torch.device("cuda", place.local_rank)


class TorchRanks(Ranks):
    """Ranks that talk by torch.distributed (gloo; gradients on GPUs by NCCL)."""

    def __init__(self, place: RankVariables, device: torch.device, timeout_s: float) -> None:
        self.rank, self.size, self.device = place.rank, place.size, device
        self.stop_requested = False
        self.lost: str | None = None  # why another rank is gone
        self._timeout_s = timeout_s
        self._is_guarding = True  # a rank that ends now has failed
        self._cancel: Callable[[], object] = lambda: None
        self._on_end: Callable[[str], None] = lambda reason: None
        self._was_lost = threading.Event()
        if not self.is_first:
            log.setLevel(logging.ERROR)  # the first one logs it
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max(1, torch.get_num_threads() // place.local_size))
        timeout, where = datetime.timedelta(seconds=timeout_s), dict[str, Any]()
        if file := os.environ.get(RENDEZVOUS):  # of --nproc: a private file; ranks of torchrun meet at MASTER_ADDR
            where = {"init_method": f"file://{file}", "rank": place.rank, "world_size": place.size}
        try:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timeout, **where)
        except (RuntimeError, ValueError) as error:
            address = file or f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise ServiceError(
                f"rank {place.rank} of {place.size} could not meet the others at {address} "
                f"({str(error).splitlines()[0]}); start all of them, with one address"
            ) from error
        self._group = dist.new_group(backend="gloo", timeout=timeout)  # for all that is not a gradient
        self._liveness = Liveness(self.rank, self._lose, self.request_stop)  # the first one hands a stop on
        is_one_machine = place.local_size == place.size
        host = "127.0.0.1" if is_one_machine else os.environ["MASTER_ADDR"]
        self._liveness.meet(self.gather, self.size, host, is_one_machine)
        if launcher := os.environ.get(LAUNCHER):
            threading.Thread(target=self._watch_launcher, args=(int(launcher),), daemon=True).start()

    def gather(self, value: T, kind: Any = None) -> list[T]:
        try:
            own, is_error = encode(value), False
        except CodecError as error:  # sent in place of the value, so that no rank waits for it
            own, is_error = str(error).encode(), True
        try:
            sizes = self._all_gather(np.array([len(own), is_error]))
            padded = np.zeros(max(size for size, _ in sizes), np.uint8)
            padded[: len(own)] = np.frombuffer(own, np.uint8)
            gathered = zip(self._all_gather(padded), sizes, strict=True)
            contents = [content[:size].tobytes() for content, (size, _) in gathered]
        except RuntimeError as error:
            self._was_lost.wait(2.0)  # a closed connection is often noticed here first
            reason = self.lost or (
                f"the other ranks do not answer ({str(error).splitlines()[0]}); if one is only slow, raise "
                f"ranks.timeout_s (now {self._timeout_s:g})"
            )
            raise ServiceError(reason) from error
        for rank, (_, is_error) in enumerate(sizes):
            if is_error:
                raise CodecError(f"rank {rank}: {contents[rank].decode()}")
        return [decode(content, kind) for content in contents]

    def _all_gather(self, array: Array) -> list[Array]:
        """The arrays of all ranks, which have the same type and shape."""
        own = torch.from_numpy(array)
        tensors = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(tensors, own, group=self._group)
        return [tensor.numpy() for tensor in tensors]

    def from_first(self, work: Callable[[], T], kind: Any = None) -> T:
        value: T | None = None
        failure: Exception | None = None
        if self.is_first:
            try:
                value = work()
            except Exception as error:
                failure = error
        expected = tuple[Optional[kind], str | None]  # noqa: UP045  # kind may be None
        found, reason = self.gather((value, None if failure is None else str(failure)), expected)[0]
        if failure is not None:
            raise failure
        if reason is not None:
            raise RankFailed(reason)
        return found  # type: ignore[return-value]

    def agree(self, config: RunConfig) -> None:
        """PalestraError unless all ranks were started with the same settings."""
        own = {key: repr(config.value(key)) for key in config.keys()}  # noqa: SIM118
        first, *others = self.gather(own, dict[str, str])
        for rank, settings in enumerate(others, 1):
            if wrong := [key for key in first if settings[key] != first[key]]:
                raise RankFailed(
                    f"rank {rank} has {wrong[0]} = {settings[wrong[0]]}, and rank 0 {first[wrong[0]]}; start all ranks "
                    "with the same command"
                )

    @contextmanager
    def interruptible(self, cancel: Callable[[], object]) -> Iterator[None]:
        self._cancel = cancel
        try:
            if self.stop_requested or self.lost:
                cancel()
            yield
        finally:
            self._cancel = lambda: None

    @contextmanager
    def guarded(self, on_end: Callable[[str], None]) -> Iterator[None]:
        self._is_guarding, self._on_end = True, on_end
        is_main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, lambda number, frame: self.request_stop()) if is_main else None
        try:
            yield
        except KeyboardInterrupt:
            self._leave()
            raise
        except Exception as error:
            self._was_lost.wait(0.0 if isinstance(error, PalestraError) else 2.0)
            own = text_of(error)
            lost = (self.lost or "").partition(": ")[2] or self.lost or ""
            reason = own if lost in own else f"{self.lost}. {own}"
            self._liveness.broadcast(f"rank {self.rank}: {reason}")
            self._is_guarding = False
            raise RankFailed(reason) from error
        else:
            self._leave()
        finally:
            if before is not None:
                signal.signal(signal.SIGINT, before)

    def request_stop(self) -> None:
        """Stop, with all ranks, where they next agree."""
        if not self.stop_requested:
            self.stop_requested = True
            self._liveness.broadcast()
            self._cancel()

    def close(self) -> None:
        """At the end of the process, unless another one has left it alone."""
        if self.lost is None and not self._is_guarding:
            dist.destroy_process_group()

    def _leave(self) -> None:
        """From here on a rank may end; none does before all are here."""
        self._is_guarding = False
        with suppress(PalestraError):
            self.gather(None)

    def _lose(self, reason: str) -> None:
        if not self._is_guarding or self.lost is not None:
            return
        self.lost = reason
        self._was_lost.set()
        self._liveness.broadcast(reason)  # the others see only the first rank
        self._cancel()
        threading.Timer(GRACE_S, self._end).start()

    def _end(self) -> None:
        """This rank is stuck in a collective that will never end."""
        if self._is_guarding and self.lost is not None:
            self._on_end(self.lost)
            if self.is_first:
                print(f"Error: {self.lost}", file=sys.stderr, flush=True)
            os._exit(1)

    def _watch_launcher(self, pid: int) -> None:
        while os.getppid() == pid:
            time.sleep(_POLL_S)
        self.request_stop()


_BACKLOG = 4096
_MAX_LINE = 100_000
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # seconds, seconds, times


class Liveness:
    """`on_lost` is called with a reason, `on_stop` without, both in a thread of this one."""

    def __init__(self, rank: int, on_lost: Callable[[str], None], on_stop: Callable[[], None]) -> None:
        self._rank = rank
        self._on_lost, self._on_stop = on_lost, on_stop
        self._peers: list[socket.socket] = []
        self._lock = threading.Lock()

    def meet(self, gather: Callable[..., list[Any]], size: int, host: str, loopback: bool) -> None:
        """Connect the first rank, at `host`, with the others."""
        names = gather(f"rank {self._rank} (process {os.getpid()} on {socket.gethostname()})", str)
        if self._rank:
            host, port, token = gather(None, tuple[str, int, str] | None)[0]
            peer = socket.create_connection((host, port), _JOIN_S)
            _send(peer, f"{token}/{self._rank}")
            self._follow(peer, peer.makefile("rb"), names[0])
        else:
            with socket.create_server(("127.0.0.1" if loopback else "", 0), backlog=_BACKLOG) as server:
                server.settimeout(_JOIN_S)
                token = secrets.token_urlsafe(16)
                gather((host, server.getsockname()[1], token), tuple[str, int, str] | None)
                while len(self._peers) < size - 1:
                    peer, _ = server.accept()
                    peer.settimeout(_JOIN_S)
                    lines = peer.makefile("rb")
                    said, _, rank = str(_read(lines)).partition("/")
                    if said == token:
                        self._follow(peer, lines, names[int(rank)])
        gather(None)

    def broadcast(self, reason: str = "") -> None:
        """Send a reason to end to all that are connected, or that they should stop."""
        with self._lock:
            for peer in self._peers:
                _send(peer, reason)

    def _follow(self, peer: socket.socket, lines: Any, name: str) -> None:
        peer.settimeout(None)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # for a machine that is gone
        for option, value in _KEEPALIVE.items():
            if hasattr(socket, option):
                peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._peers.append(peer)
        threading.Thread(target=self._listen, args=(lines, name), daemon=True, name="liveness").start()

    def _listen(self, lines: Any, name: str) -> None:
        while (reason := _read(lines)) is not None:
            self._on_lost(str(reason)) if reason else self._on_stop()
        self._on_lost(
            f"{name} ended without a word; it was killed (by the system, if memory ran out), or its machine is gone"
        )


def _send(peer: socket.socket, text: str) -> None:
    with suppress(OSError):  # it is gone, which its own thread notices
        peer.sendall(json.dumps(text).encode() + b"\n")


def _read(lines: Any) -> Any:
    """What `_send` sent; None at the end, or where something else talks to the port."""
    try:
        return json.loads(lines.readline(_MAX_LINE) or b"null")
    except (OSError, ValueError):
        return None
