"""Chats with a run's model and its tools: a `palestra chat` process each, whose output is streamed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import secrets
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from palestra.core import children
from palestra.core.errors import InputError, PalestraError, ServiceError, SettingError, StateError, UserCodeError
from palestra.core.secrets import own_environment, redact
from palestra.extras.dashboard.answers import Event, answer, events
from palestra.extras.dashboard.catalog import Catalog
from palestra.runs.request import PALESTRA
from palestra.servers.web import MIB, Form, read_model, refuse

_MAX_CHATS = 3  # each holds a model
_IDLE_S = 600.0
_LOAD_S = 600.0  # a model may have to be downloaded first
_REAP_S = 15.0
_LOOK_S = 0.02
_COMPLAINTS = 1000


class ChatBody(Form):
    run: str | None = None
    checkpoint: str | None = Field(None, pattern=r"^(best|last|\d+)$")
    model: str | None = Field(None, max_length=500)
    temperature: float = Field(0.0, ge=0, le=10)
    max_new_tokens: int = Field(512, ge=1, le=100_000)


class SayBody(Form):
    text: str = Field(max_length=MIB)


class Chat:
    """One process. Its lines are read by a thread, so that none is waited for in an event loop."""

    def __init__(self, word: str, body: ChatBody, trust_words: Sequence[str] = ()) -> None:
        self.id = secrets.token_hex(6)
        self.used = time.monotonic()
        self.busy = threading.Lock()
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the process)
        sampling = ["--temperature", str(body.temperature), "--max-new-tokens", str(body.max_new_tokens)]
        self._process = children.start(
            [*PALESTRA, "chat", "--events", *trust_words, *sampling, "--", word],
            env=own_environment(),
            stdin=subprocess.PIPE,
            stderr=self._complaints,
        )
        self._lines: queue.Queue[tuple[str, Any] | None] = queue.Queue()
        threading.Thread(target=self._read, name="palestra-chat", daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError, OSError):  # closed
            for line in self._process.stdout:
                with contextlib.suppress(ValueError):  # what a tool printed
                    ((kind, data),) = json.loads(line).items()
                    self._lines.put((kind, data))
        self._lines.put(None)

    def next(self, timeout_s: float) -> tuple[str, Any]:
        """The next event; PalestraError if the process has ended or times out; queue.Empty if `timeout_s` is 0."""
        try:
            line = self._lines.get(block=timeout_s > 0, timeout=timeout_s)
        except queue.Empty:
            if not timeout_s:
                raise
            raise ServiceError(f"the model did not answer for {timeout_s:g} s") from None
        if line is None:
            self._lines.put(None)
            self._complaints.seek(0)
            text = redact(self._complaints.read()).strip()[-_COMPLAINTS:]
            raise UserCodeError(text.rpartition("Error: ")[2] or "the chat's process has ended")
        return line

    def say(self, text: str) -> None:
        self.used = time.monotonic()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"say": text}) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            raise StateError("the chat's process has ended; open a new one") from None

    def drain(self) -> None:
        """Stop an answer and read it to its end, so that the next question gets its own."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
        try:
            with contextlib.suppress(PalestraError):
                while self.next(30.0)[0] not in ("done", "error"):
                    pass
        finally:
            self.busy.release()

    def close(self) -> None:
        children.end(self._process, terminate_s=1.0)
        self._complaints.close()


class Chats:
    """The chats of this server. One that was idle for ten minutes is closed."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._chats: dict[str, Chat] = {}
        self._lock = threading.Lock()

    def routes(self) -> list[Route]:
        return [
            Route("/api/chats", self.open, methods=["POST"]),
            Route("/api/chats/{chat}", self.end, methods=["DELETE"]),
            Route("/api/chats/{chat}/say", self.say, methods=["POST"]),
        ]

    async def open(self, request: Request) -> Response:
        body = await read_model(request, ChatBody)
        return await asyncio.to_thread(self._open, body)

    def _open(self, body: ChatBody) -> Response:
        if (body.run is None) == (body.model is None):
            raise SettingError("name a run or a model, and not both")
        word = str(body.model)
        if body.run is not None:
            folder = self._catalog.get(body.run).folder
            word = f"{folder.path}@{body.checkpoint}" if body.checkpoint else str(folder.path)
        with self._lock:
            if len(self._chats) >= _MAX_CHATS:
                oldest = min(self._chats.values(), key=lambda chat: chat.used)
                self._chats.pop(oldest.id).close()
            chat = Chat(word, body, self._catalog.trust_words)
            self._chats[chat.id] = chat
            if len(self._chats) == 1:
                threading.Thread(target=self._reap, name="palestra-chats", daemon=True).start()
        try:
            kind, about = chat.next(_LOAD_S)
            if kind != "ready":
                raise InputError(f"the chat began with {kind!r}")
        except PalestraError:
            self._forget(chat.id)
            raise
        shown = Path(about["model"]).name if body.run else about["model"]
        return answer({"chat": {"id": chat.id, **about, "model": shown}}, 201)

    async def say(self, request: Request) -> Response:
        body = await read_model(request, SayBody, 8 * MIB)
        chat = self._chats.get(request.path_params["chat"])
        if chat is None:
            raise refuse(404, "there is no such chat; it may have ended because it was idle")
        if not chat.busy.acquire(blocking=False):
            raise refuse(409, "it is answering; wait for the end, or stop it")
        return events(self._answer(chat, body.text))

    async def _answer(self, chat: Chat, text: str) -> AsyncIterator[Event]:
        ended = False
        try:
            await asyncio.to_thread(chat.say, text)
            while not ended:
                try:
                    kind, data = chat.next(0.0)
                except queue.Empty:
                    await asyncio.sleep(_LOOK_S)  # not in a thread, which would continue after the page is closed
                    continue
                chat.used = time.monotonic()
                ended = kind in ("done", "error")
                yield kind, {"delta": {"text": data}, "error": {"message": data}}.get(kind, data)
        except PalestraError as error:
            ended = True
            self._forget(chat.id)
            yield "error", {"message": str(error)}
        finally:
            if not ended:  # the page has gone, or stopped it
                threading.Thread(target=chat.drain, daemon=True).start()
            else:
                chat.busy.release()

    async def end(self, request: Request) -> Response:
        await asyncio.to_thread(self._forget, request.path_params["chat"])
        return answer({"ended": request.path_params["chat"]})

    def close(self) -> None:
        for chat_id in list(self._chats):
            self._forget(chat_id)

    def _forget(self, chat_id: str) -> None:
        with self._lock:
            chat = self._chats.pop(chat_id, None)
        if chat is not None:
            chat.close()

    def _reap(self) -> None:
        while self._chats:
            time.sleep(_REAP_S)
            for chat in list(self._chats.values()):
                if time.monotonic() - chat.used > _IDLE_S:
                    self._forget(chat.id)
