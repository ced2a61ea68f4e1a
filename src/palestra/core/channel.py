"""Messages between two of our own processes over a socket: calls with replies, and one-way messages."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from struct import Struct
from typing import Any, TypeVar

from palestra.core.codec import CodecError, decode, encode
from palestra.core.errors import PalestraError, StateError, text_of
from palestra.core.text import encodable

_READ_BYTES = 1 << 18
MAX_FAILURES = 100  # of this process that the other one may raise back
_HEAD = Struct("<QqB")  # before each message: bytes of what follows, number of the call, bytes of the kind
_ONE_WAY = -1  # the number of a message without a reply
_ANSWERS = ("reply", "error")

log = logging.getLogger("palestra")

T = TypeVar("T")
Handlers = Mapping[str, Callable[..., object]]  # by the kind of a message; they get its values


class Channel:
    """One end. Each message is encoded by itself when it is sent; those of one round of the event loop are written
    together, in order.

    Values are decoded by the annotations of the handler that gets them. A value that cannot be encoded is a
    CodecError: of `send`, or of the call, to whose end it is reported; other messages are unaffected.
    `on_closed` is called once, when the other process has closed its end or has ended.
    """

    def __init__(self, sock: socket.socket, handlers: Handlers, on_closed: Callable[[], None]) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._loop = asyncio.get_running_loop()
        handlers = {**handlers, "cancel": self._cancel}
        self._handlers = {kind: (function, _types(function)) for kind, function in handlers.items()}
        self._on_closed = on_closed
        self._numbers = itertools.count()
        self._calls: dict[int, tuple[asyncio.Future[Any], Any]] = {}  # with the type of the reply
        self._answers: dict[int, asyncio.Future[Any]] = {}  # to calls of the other process that are not there yet
        self._failures: dict[str, BaseException] = {}  # that were reported and have no class there, by their texts
        self._is_flushing = self._is_waiting = False  # for the end of this round; for the socket
        self._unsent = bytearray()
        self._received = bytearray()
        self._end: Exception | None = None  # why it is closed
        self._loop.add_reader(sock, self._read)

    def send(self, kind: str, *values: Any) -> None:
        self._send(kind, _ONE_WAY, values)

    def send_from_any_thread(self, kind: str, *values: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed
            self._loop.call_soon_threadsafe(self.send, kind, *values)

    def call(self, kind: str, *values: Any, returns: Any = Any) -> tuple[int, asyncio.Future[Any]]:
        """Send a message whose handler gets the number of the call first; the reply, of type `returns`, is the future's
        result."""
        number, future = next(self._numbers), self._loop.create_future()
        self._calls[number] = future, returns
        try:
            if self._end is not None:
                raise self._end
            self._send(kind, number, values)
        except Exception as error:
            self._settle(number, error)
        return number, future

    def reply(self, number: int, *values: Any) -> None:
        """Reply to a call with one value, or with several as a tuple."""
        try:
            self._send("reply", number, values[0] if len(values) == 1 else values)
        except CodecError as error:
            self.fail(number, error)

    def answer(self, number: int, work: Awaitable[T], form: Callable[[T], Any] = lambda value: value) -> None:
        """Reply to a call with the outcome of this work in this form. The other process can cancel it."""
        self._answers[number] = future = asyncio.ensure_future(work)
        future.add_done_callback(partial(self._answered, number, form))

    def _answered(self, number: int, form: Callable[[Any], Any], work: asyncio.Future[Any]) -> None:
        del self._answers[number]
        error = asyncio.CancelledError() if work.cancelled() else work.exception()
        if error is not None:
            self.fail(number, error)
        else:
            self.reply(number, form(work.result()))

    def cancel(self, number: int) -> None:
        """Ask the other process to cancel what it does for a call; its reply comes when that has ended."""
        self.send("cancel", number)

    def _cancel(self, number: int) -> None:
        if (work := self._answers.get(number)) is not None:
            work.cancel()

    def fail(self, number: int, error: BaseException) -> None:
        """Reply with an error. The other process gets other errors than ours as a RuntimeError with the same text;
        where it raises that in turn, the error itself comes back."""
        names = [_name(kind) for kind in type(error).__mro__]
        if not isinstance(error, PalestraError):
            self._failures[str(error) if type(error) is RuntimeError else text_of(error)] = error
            if len(self._failures) > MAX_FAILURES:  # an error holds the frames in which it was raised
                del self._failures[next(iter(self._failures))]
        if isinstance(error, PalestraError) or type(error) is RuntimeError:
            with contextlib.suppress(CodecError):  # of its arguments or fields
                self._send("error", number, (names, list(error.args), vars(error)))
                return
        self._send("error", number, (names, [text_of(error)], {}))

    def close(self, reason: Exception | None = None) -> None:
        """Close this end; calls without a reply fail with the reason, or are cancelled."""
        if self._end is not None:
            return
        self._end = reason or StateError("the channel to the other process is closed")
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        for work in list(self._answers.values()):
            work.cancel()
        calls, self._calls = self._calls, {}
        for future, _ in calls.values():
            if reason is None or future.done():
                future.cancel()
            else:
                future.set_exception(reason)

    def _send(self, kind: str, number: int, values: Any) -> None:
        try:
            body = encode(values if number == _ONE_WAY or kind in _ANSWERS else (number, *values))
        except CodecError:
            for value in values if isinstance(values, tuple) else [values]:
                try:
                    encode(value)
                except CodecError as error:  # it says where in this value the part is
                    raise CodecError(f"{kind}: {error}") from None
            raise
        if self._end is not None:
            return
        name = kind.encode()
        self._unsent += _HEAD.pack(len(name) + len(body), number, len(name)) + name + body
        if not self._is_flushing and not self._is_waiting:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        if self._socket.fileno() >= 0:
            self._write()
            if self._unsent:
                self._is_waiting = True
                self._loop.add_writer(self._socket, self._write_rest)

    def _write(self) -> None:
        try:
            sent = self._socket.send(self._unsent)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:  # the reader learns that the other end is closed
            sent = len(self._unsent)
        del self._unsent[:sent]

    def _write_rest(self) -> None:
        self._write()
        if not self._unsent:
            self._is_waiting = False
            self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        """Handle all messages that have arrived."""
        is_closed = False
        while True:
            try:
                received = self._socket.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                received = b""
            self._received += received
            if len(received) < _READ_BYTES:
                is_closed = not received
                break
        for kind, number, body in self._messages():
            self._handle(kind, number, body)
        if is_closed:
            self._loop.remove_reader(self._socket)
            self._on_closed()

    def _messages(self) -> Iterator[tuple[str, int, memoryview]]:
        while len(self._received) >= _HEAD.size:
            size, number, name = _HEAD.unpack_from(self._received)
            end = _HEAD.size + size
            if len(self._received) < end:
                break
            with memoryview(self._received) as view:
                message = memoryview(bytes(view[_HEAD.size : end]))
            del self._received[:end]
            yield str(message[:name], "utf-8", "replace"), number, message[name:]

    def _handle(self, kind: str, number: int, body: memoryview) -> None:
        try:
            if kind == "reply":
                if number in self._calls:
                    self._settle(number, decode(body, self._calls[number][1]))
            elif kind == "error":
                error = _error(*decode(body, tuple[list[str], list[Any], dict[str, Any]]))
                self._settle(number, self._failures.get(str(error), error))
            elif kind in self._handlers:
                function, types = self._handlers[kind]
                function(*decode(body, types))
            else:
                raise StateError(f"nothing here handles messages of the kind {kind}")
        except Exception as failure:
            if kind in _ANSWERS:
                self._settle(number, failure)
            elif number != _ONE_WAY:
                self.fail(number, failure)
            else:
                log.exception("a message between processes (%s) failed", kind)

    def _settle(self, number: int, outcome: Any) -> None:
        """End a call with its value or its error."""
        future, _ = self._calls.pop(number, (None, None))
        if future is None or future.done():
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _types(function: Callable[..., object]) -> Any:
    """The types of what a handler takes, as those of a tuple."""
    try:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
    except ValueError:  # a function written in C
        return tuple[Any, ...]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return tuple[Any, ...]
    types = (Any if p.annotation is p.empty else p.annotation for p in parameters if p.kind is not p.KEYWORD_ONLY)
    return tuple[tuple(types)]  # type: ignore[misc]


class LogToChannel(logging.Handler):
    """Sends log records as `log` messages to the other process, whose handlers show them."""

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        self._channel.send_from_any_thread("log", record.name, record.levelno, encodable(self.format(record)))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _error(names: list[str], arguments: list[Any], more: dict[str, Any]) -> Exception:
    """The error of the first class that this process knows: one of ours, or RuntimeError."""
    known, unseen = dict[str, type[Exception]](), [PalestraError]
    while unseen:
        kind = unseen.pop()
        known[_name(kind)] = kind
        unseen += kind.__subclasses__()
    cls = next((known[name] for name in names if name in known), RuntimeError)
    error = cls.__new__(cls, *arguments)  # without __init__, whose arguments may be others
    vars(error).update(more)
    return error
