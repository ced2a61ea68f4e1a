"""Requests that are answered later: each has an id to ask by, and each model's are done in the order of `seq_id`."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from palestra.core.errors import NotFoundError, ResourceError, StateError

Result = bytes | dict[str, Any]  # protobuf, or what becomes JSON
KEPT_BYTES = 256 << 20  # of results that were fetched, in case that the answer was lost on its way
KEPT_REQUESTS = 100_000
MAX_AHEAD = 4096  # requests of one model that may wait for an earlier one


class TooBusy(ResourceError):
    status = 429


class Gone(StateError):
    status = 410  # it existed once


class NotFound(NotFoundError):
    status = 404


@dataclass(eq=False, slots=True)
class Request:
    """One request in flight. `kind` is what was asked for, so that a reused number is noticed."""

    id: str
    kind: str
    about: dict[str, Any]  # what else the client is told before the result
    future: Future[Result] = field(default_factory=Future)

    @property
    def promise(self) -> dict[str, Any]:
        return {"request_id": self.id, **self.about}


class Requests:
    """All requests of a server by their ids."""

    def __init__(self) -> None:
        self._life = secrets.token_hex(4)  # ids from before a restart of the server are not taken for ours
        self._number = itertools.count()
        self._all: OrderedDict[str, Request] = OrderedDict()
        self._fetched: OrderedDict[str, int] = OrderedDict()  # id -> bytes
        self._fetched_bytes = 0
        self._lock = threading.Lock()

    def new(self, kind: str, **about: Any) -> Request:
        request = Request(f"r{self._life}-{next(self._number)}", kind, about)
        with self._lock:
            self._all[request.id] = request
            while len(self._all) > KEPT_REQUESTS:
                self._all.popitem(last=False)
        return request

    def find(self, request_id: str) -> Request:
        request = self._all.get(request_id)
        if request is None:
            raise Gone(
                f"the server knows no request {request_id!r}: fetched long ago, or before a restart; send it again"
            )
        return request

    def fetched(self, request: Request) -> None:
        """It was answered; what was answered longest ago is forgotten when there is too much of it."""
        result = None if request.future.exception() else request.future.result()
        size = len(result) if isinstance(result, bytes) else 0
        with self._lock:
            if request.id not in self._fetched:
                self._fetched[request.id] = size
                self._fetched_bytes += size
            while self._fetched_bytes > KEPT_BYTES:
                old, size = self._fetched.popitem(last=False)
                self._fetched_bytes -= size
                self._all.pop(old, None)


class OrderedWorker:
    """Does one model's requests in a thread of its own, strictly by number; what comes early waits.

    The SDK numbers from 1, and may send the first part of a split request last.
    """

    def __init__(self, name: str, requests: Requests, prepare: Callable[[], None] | None = None) -> None:
        """`prepare` is called in the thread before anything else."""
        self._requests = requests
        self._next = 1
        self._known: dict[int, Request] = {}
        self._early: dict[int, Callable[[], Result]] = {}
        self._started: Request | None = None  # the last one
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, f"tinker-{name}", prepare)

    @property
    def is_busy(self) -> bool:
        """Whether a started request is not done yet; those that wait for a missing one do not count."""
        return self._started is not None and not self._started.future.done()

    def run(self, kind: str, work: Callable[[], Result], **about: Any) -> Request:
        """Do this in its turn among what has been started; for what has no number."""
        request = self._requests.new(kind, **about)
        self._start(request, work)
        return request

    def submit(self, seq_id: int, kind: str, work: Callable[[], Result], **about: Any) -> Request:
        """The request of this number: a repeated one is the same, and is done once."""
        with self._lock:
            known = self._known.get(seq_id)
            if known is not None:
                if known.kind != kind:
                    raise StateError(f"seq_id {seq_id} was a {known.kind} before and is a {kind} now; count up")
                return known
            if seq_id < self._next:
                raise StateError(f"seq_id {seq_id} is below {self._next}, the next one; numbers begin at 1")
            if seq_id - self._next >= MAX_AHEAD:
                raise TooBusy(f"seq_id {seq_id} is {MAX_AHEAD} or more ahead of {self._next}, which has not come yet")
            request = self._known[seq_id] = self._requests.new(kind, **about)
            self._early[seq_id] = work
            while self._next in self._early:
                self._start(self._known[self._next], self._early.pop(self._next))
                self._next += 1
                self._known.pop(self._next - KEPT_REQUESTS, None)
            return request

    def _start(self, request: Request, work: Callable[[], Result]) -> None:
        self._started = request
        self._thread.submit(do, work, request.future)

    def close(self, reason: str) -> None:
        """Stop; requests that wait get an error."""
        with self._lock:
            waiting = [self._known[seq_id] for seq_id in self._early]
            self._early.clear()
        for request in waiting:
            request.future.set_exception(Gone(reason))
        self._thread.shutdown(wait=False)


def do(work: Callable[[], Result], future: Future[Result]) -> None:
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
