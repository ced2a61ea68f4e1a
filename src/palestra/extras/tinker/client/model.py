"""One model on a Tinker server, and what it takes to make it again where the server has lost it.

What changed the model (gradients, optimizer steps) is kept since its last saved state. When its session is lost, by a
restart of the server for instance, another is opened: the state is loaded and what came after it is sent again. Whoever
waits for an answer only notices that it took longer.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tinker
from tinker.types import RequestErrorCategory

from palestra.core.errors import PalestraError, ServiceError
from palestra.core.http import HttpError, Request
from palestra.core.time_limit import outside_event_loop

log = logging.getLogger("palestra")

STEPS_BETWEEN_STATES = 20  # sent again at most, where no checkpoint is written that often
RECOVERY_TTL_S = 7 * 24 * 3600
_RECOVERIES = 3  # in a row, without an answer in between
_POLL_S = 15.0
_GIVE_UP_S = 600.0  # without any answer from the server
_MAX_FILE_BYTES = 2**40
_LOST_STATUSES = (404, 408, 409, 410, 429)  # unknown to the server, or still busy after all of the SDK's retries


@dataclass(slots=True, eq=False)
class ModelChange:
    """A request that changes the model: how it is sent, and the future of its answer."""

    send: Callable[[Any], Any]  # a training client -> a future
    is_step: bool = False
    future: Any = None


@dataclass(slots=True, eq=False)
class Sampler:
    """Weights to sample from, the base model's or those of one version. `client` is another one after a recovery."""

    version: int
    make: Callable[[Any, Any], Any]  # a session and its training client -> a sampling client
    client: Any = None


class TinkerModel:
    """A training client that outlives its session.

    >>> model = TinkerModel(connect, lambda service: service.create_lora_training_client("Qwen/Qwen3-8B", rank=32))  # doctest: +SKIP
    >>> gradient = model.change(lambda client: client.forward_backward(data, "cross_entropy"))
    >>> model.change(lambda client: client.optim_step(AdamParams(learning_rate=1e-4)), is_step=True)
    >>> model.answer(gradient).loss_fn_outputs
    """  # noqa: E501

    def __init__(
        self,
        connect: Callable[[], Any],
        create: Callable[[Any], Any],
        rest: Callable[[str | None], Any] = lambda url: tinker.RestClient(base_url=url),
    ) -> None:
        """`connect` opens a session, `create` makes the model as it was at the beginning in one."""
        self.state: str | None = None  # the tinker:// path of the last saved state; None: the beginning
        self._connect, self._create, self._rest = connect, create, rest
        self._lock, self._checking = threading.RLock(), threading.Lock()
        self._generation = 0
        self._failures = 0
        self._has_gap = False
        self._changes: list[ModelChange | Sampler] = []  # since `state`, in order
        self._reference: Sampler | None = None
        self._steps = 0
        self._recovery_state: str | None = None
        self._answered = time.monotonic()
        self.service: Any = None
        self._client: Any = None
        try:
            self._open()
        except tinker.TinkerError as error:
            raise refusal(error) from error

    def change(self, send: Callable[[Any], Any], *, is_step: bool = False) -> ModelChange:
        """Send a request that changes the model; `answer` waits for it."""
        with self._lock:
            change = ModelChange(send, is_step)
            client = self._usable()
            self._changes.append(change)
            change.future = send(client)
        return change

    def answer(self, change: ModelChange) -> Any:
        result = self.call(lambda client: change.future)
        if change.is_step:
            self._steps += 1
            if self._steps >= STEPS_BETWEEN_STATES:
                older, self._recovery_state = self._recovery_state, self.save("recovery", RECOVERY_TTL_S)
                if older is not None:
                    self.delete(older)
        return result

    def undo(self, changes: Sequence[ModelChange]) -> None:
        """Make the model again without these changes: Tinker itself cannot forget a gradient."""
        with self._lock:
            self._changes = [change for change in self._changes if change not in changes]
            self._reopen()

    def sampler(self, version: int) -> Sampler:
        """The weights of now, to sample from."""
        sampler = Sampler(version, lambda service, client: client.save_weights_and_get_sampling_client())
        self._make(sampler)
        with self._lock:  # the last one alone is made again
            self._changes = [change for change in self._changes if isinstance(change, ModelChange)] + [sampler]
        return sampler

    def reference(self, base_model: str) -> Sampler:
        """The base model, to score tokens with."""
        if self._reference is None:
            sampler = Sampler(0, lambda service, client: service.create_sampling_client(base_model=base_model))
            self._make(sampler)
            self._reference = sampler
        return self._reference

    def _make(self, sampler: Sampler) -> None:
        sampler.client = self.call(lambda client: _in_thread(partial(sampler.make, self.service, client)))

    def save(self, name: str, ttl_s: int | None = None) -> str:
        """Save weights and optimizer at the server; gives the tinker:// path."""
        unique = f"{name}-{uuid.uuid4().hex[:8]}"  # a name is never written twice: half a save must not be loaded
        path: str = self.call(lambda client: client.save_state(unique, ttl_s)).path
        with self._lock:
            self.state, self._steps = path, 0
            last = max((i for i, c in enumerate(self._changes) if isinstance(c, ModelChange) and c.is_step), default=-1)
            self._changes = [c for i, c in enumerate(self._changes) if i > last or isinstance(c, Sampler)]
        return path

    def load(self, path: str) -> None:
        """Go on from a saved state, with its optimizer."""
        with self._lock:
            before = self.state, self._changes
            self.state, self._changes, self._steps = path, [], 0
            try:
                self._reopen()
            except Exception:
                self.state, self._changes = before
                raise

    def delete(self, path: str) -> None:
        """Delete a saved state, if the server still has it."""
        if path == self.state:
            return
        try:
            self._rest(self._url).delete_checkpoint_from_tinker_path(path).result(_POLL_S)
        except Exception as error:  # it only takes up space
            log.warning("the state %s could not be deleted: %s", path, refusal(error))

    def download(self, folder: Path) -> Path:
        """Write the weights into a folder, in the files of Hugging Face: the adapter, or the whole model."""
        name = f"export-{uuid.uuid4().hex[:8]}"
        path = self.call(lambda client: client.save_weights_external(name)).path
        urls = self.call(lambda client: self._rest(self._url).get_external_weights_urls(path)).urls
        folder.mkdir(parents=True, exist_ok=True)
        for file, url in urls.items():
            target = (folder / file).resolve()
            if not target.is_relative_to(folder.resolve()):
                raise ServiceError(f"the Tinker server names a file {file!r} outside of the model's folder")
            target.parent.mkdir(parents=True, exist_ok=True)
            # the key is for files on the server itself; signed URLs of other hosts must not see it
            key = os.environ.get("TINKER_API_KEY")
            headers = {"X-API-Key": key} if key and self._url and url.startswith(f"{self._url}/") else {}
            reply = Request(url, headers=headers, timeout_s=600.0, max_bytes=_MAX_FILE_BYTES).send()
            if reply.status != 200:
                raise HttpError(url.partition("?")[0], "a file of the trained model", reply.status)
            target.write_bytes(reply.body)
        return folder

    def close(self, *, good: bool) -> None:
        """End the session; the saved states stay."""
        try:
            self.service.close("success" if good else "errored").result(_POLL_S)
        except Exception as error:  # or the SDK goes on sending heartbeats for the session
            log.warning("the Tinker server does not answer that its session is over: %s", refusal(error))
            self.service.holder.close()

    def call(self, make: Callable[[Any], Any]) -> Any:
        """The result of a future that `make` gives, by another session if this one is lost."""
        return _run(self.call_async(lambda: make(self._usable()), is_numbered=True))

    async def call_async(self, make: Callable[[], Any], *, is_numbered: bool = False) -> Any:
        """As `call`, for one of many callers on an event loop."""
        while True:
            generation = self._generation
            try:
                result = await self._answer(make())
            except Exception as error:
                await asyncio.to_thread(self._recover, error, generation, is_numbered)
            else:
                self._failures = 0
                return result

    async def _answer(self, future: Any) -> Any:
        plain = asyncio.wrap_future(_plain(future))
        try:
            while not plain.done():
                await asyncio.wait({plain}, timeout=_POLL_S)
                if not plain.done():
                    await asyncio.to_thread(self._check_server)
        finally:
            plain.cancel()
        return plain.result()

    def _usable(self) -> Any:
        """The training client; a new one after a rejected request, whose number the server may wait for."""
        if self._has_gap:
            with self._lock:
                self._reopen()
        return self._client

    @property
    def _url(self) -> str | None:
        return getattr(getattr(self.service, "holder", None), "_base_url", None)

    def _check_server(self) -> None:
        """Give up where nothing has answered for long: the SDK would wait for ever."""
        url = self._url
        with self._checking:
            away_s = time.monotonic() - self._answered
            if url is None or away_s < _POLL_S:
                return
            try:
                Request(f"{url}/api/v1/healthz", timeout_s=_POLL_S).send()
            except HttpError as error:
                if away_s > _GIVE_UP_S:
                    raise self._lost(error) from error
            else:
                self._answered = time.monotonic()

    def _recover(self, error: Exception, generation: int, is_numbered: bool) -> None:
        """Open another session where this one is lost; any other error is raised."""
        with self._lock:
            if generation != self._generation:  # someone else has done it
                return
            status = _status_error(error)
            is_unknown = status is not None and status.status_code == 404
            if not is_lost(error) or (is_unknown and self._failures > 0):  # it knows the new session
                self._has_gap = is_numbered
                raise refusal(error) from error
            if self._failures >= _RECOVERIES:
                raise self._lost(error) from error
            self._failures += 1
            what = self.state or "the beginning"
            log.warning("the Tinker session is lost (%s); opening another from %s", refusal(error), what)
            self._reopen()

    def _reopen(self) -> None:
        old, self._generation, self._has_gap = self.service, self._generation + 1, False
        try:
            self._open()
            for change in [*self._changes, *([self._reference] if self._reference else [])]:
                if isinstance(change, ModelChange):
                    change.future = change.send(self._client)
                else:
                    change.client = _run(self._answer(_in_thread(partial(change.make, self.service, self._client))))
        except tinker.TinkerError as error:
            raise self._lost(error) from error
        finally:
            if old is not self.service:
                old.close("interrupted")

    def _open(self) -> None:
        service, state = self._connect(), self.state
        if state is None:
            making = _in_thread(lambda: self._create(service))
        else:
            making = _in_thread(lambda: service.create_training_client_from_state_with_optimizer(state))
        self._client, self.service = _run(self._answer(making)), service
        self._answered = time.monotonic()

    def _lost(self, error: Exception) -> PalestraError:
        last = f"the last state that it saved is {self.state}" if self.state else "it has saved no state yet"
        return ServiceError(f"the Tinker session is lost, and could not be opened again ({refusal(error)}); {last}")


def _run(answer: Coroutine[Any, Any, Any]) -> Any:
    return outside_event_loop(lambda: asyncio.run(answer))


def _plain(future: Any) -> Future[Any]:
    """The SDK has its own kind of future around one of the standard library."""
    plain: Future[Any] = future.future() if isinstance(future, tinker.APIFuture) else future
    return plain


def _in_thread(make: Callable[[], Any]) -> Future[Any]:
    """The future of a client that the SDK makes: it waits inside of `make`, or gives a future (0.38 and newer)."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # who gives up waiting cannot cancel it

    def run() -> None:
        try:
            client = make()
            future.set_result(client.result() if isinstance(client, tinker.APIFuture) else client)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def is_lost(error: Exception) -> bool:
    """Whether the session or the server is at fault, rather than the request."""
    status = _status_error(error)
    if status is not None:
        return status.status_code in _LOST_STATUSES or status.status_code >= 500
    if isinstance(error, tinker.RequestFailedError):
        return error.category is not RequestErrorCategory.User
    # a promise that has expired; the class is not public
    is_expired = type(error).__name__ == "RetryableException"
    return is_expired or isinstance(error, tinker.APIConnectionError | asyncio.TimeoutError)


def refusal(error: Exception) -> Exception:
    """A sentence in place of an error of the SDK; any other error as it is."""
    if isinstance(error, PalestraError):
        return error
    status = _status_error(error)
    if isinstance(status, tinker.AuthenticationError | tinker.PermissionDeniedError):
        return ServiceError(f"the Tinker server does not accept the key in TINKER_API_KEY: {_detail(status)}")
    if status is not None:
        return ServiceError(f"the Tinker server answers {status.status_code}: {_detail(status)}")
    if isinstance(error, tinker.RequestFailedError):
        text = error.message.removeprefix("Request failed: ").partition(" for self.request_id")[0]
        return ServiceError(f"the Tinker server refuses a request: {text}")
    if isinstance(error, tinker.TinkerError):
        return ServiceError(f"Tinker: {error}")
    return error


def _status_error(error: Exception) -> tinker.APIStatusError | None:
    """The HTTP status behind an error: futures raise ValueError from it."""
    for candidate in (error, error.__cause__):
        if isinstance(candidate, tinker.APIStatusError):
            return candidate
    return None


def _detail(error: tinker.APIStatusError) -> str:
    """The sentence in an answer's body: {"detail": …}, or {"error": {"message": …}}."""
    detail: Any = error.body
    while isinstance(detail, dict):
        detail = next((detail[key] for key in ("detail", "error", "message") if key in detail), str(detail))
    return str(detail or error.message)
