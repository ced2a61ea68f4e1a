"""Stands between an environment's process and the endpoint: it holds the key, and counts tokens and their cost."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

from palestra.agent_tools.answers import short
from palestra.agent_tools.models import Candidate
from palestra.core.errors import PalestraError
from palestra.core.http import HttpError, Request

_MAX_BODY_BYTES = 50_000_000
_MAX_REPLY_BYTES = 50_000_000


@dataclass
class Usage:
    """What one model was asked, and what it cost; `cost_usd` is None while no answer has named a cost."""

    requests: int = 0
    completions: int = 0  # asked for
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def reserve(self, completions: int, limit: int) -> bool:
        """Count what is about to be asked; False, and nothing is counted, where that would be more than `limit`."""
        with self._lock:
            if self.completions + completions > limit:
                return False
            self.completions += completions
            return True

    def add(self, ok: bool, reply: bytes) -> None:
        usage = _usage(reply) if ok else {}
        with self._lock:
            self.requests += 1
            self.prompt_tokens += _count(usage.get("prompt_tokens"))
            self.completion_tokens += _count(usage.get("completion_tokens"))
            cost = usage.get("cost")
            if isinstance(cost, int | float) and not isinstance(cost, bool):
                self.cost_usd = (self.cost_usd or 0.0) + cost


def _usage(reply: bytes) -> dict[str, Any]:
    try:
        usage = json.loads(reply)["usage"]
    except (ValueError, KeyError, TypeError):
        return {}
    return usage if isinstance(usage, dict) else {}


def _error(message: str) -> bytes:
    return json.dumps({"error": {"message": message}}).encode()


def _count(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


class Relay:
    """A server on a loopback port for the models at endpoints, at /0/v1, /1/v1, … with a token of its own.

    Each is asked for the model that is tested, and for `max_completions` in all.
    """

    def __init__(self, models: Sequence[Candidate], timeout_s: float, max_completions: int) -> None:
        self.usage = [Usage() for _ in models]
        self._models = models
        self.token = secrets.token_urlsafe(24)
        self._timeout_s, self._max_completions = timeout_s, max_completions
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.relay = self  # type: ignore[attr-defined]

    def url(self, index: int) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/{index}/v1"

    @contextlib.contextmanager
    def running(self) -> Iterator[Relay]:
        thread = threading.Thread(target=self._server.serve_forever, name="palestra-relay", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()

    def ask(self, index: int, body: bytes) -> tuple[int, bytes]:
        """Pass a request on, and count what comes back."""
        try:
            request = self._admit(index, body)
        except PalestraError as error:
            return 403, _error(str(error))
        status, reply = self._post(self._models[index], request)
        self.usage[index].add(status == 200, reply)
        return status, reply

    def _admit(self, index: int, body: bytes) -> dict[str, Any]:
        """The request of an environment, which may ask for nothing but what is being tested."""
        try:
            request = json.loads(body)
        except (ValueError, RecursionError):
            request = None
        if not isinstance(request, dict):
            raise PalestraError("the body is not a JSON object")
        name, count = self._models[index].name, request.get("n") or 1
        if request.get("model") != name:
            raise PalestraError(f"this is a test of {name}; another model is not asked")
        if not isinstance(count, int) or count < 1 or not self.usage[index].reserve(count, self._max_completions):
            raise PalestraError(f"n={short(count)}: this test may ask for {self._max_completions} completions in all")
        return request

    def _post(self, model: Candidate, request: dict[str, Any]) -> tuple[int, bytes]:
        key = os.environ.get(model.api_key_env) if model.api_key_env else None  # read anew for each request
        url = f"{(model.base_url or '').rstrip('/')}/chat/completions"
        body = {**request, **model.more}
        try:
            reply = Request(url, body, token=key, timeout_s=self._timeout_s, max_bytes=_MAX_REPLY_BYTES).send()
        except HttpError as error:
            return 502, _error(str(error))
        return reply.status, reply.body


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        relay = cast(Relay, self.server.relay)  # type: ignore[attr-defined]
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        length = self.headers.get("Content-Length", "")
        index = self.path.removesuffix("/v1/chat/completions").removeprefix("/")
        if not hmac.compare_digest(token.encode(), relay.token.encode()):
            self._answer(401, _error("the token is wrong"))
        elif not (length.isdecimal() and int(length) <= _MAX_BODY_BYTES):
            self._answer(413, _error("the body is too large"))
        elif not (index.isdecimal() and int(index) < len(relay.usage)):
            self._answer(404, _error("there is nothing at this path"))
        else:
            self._answer(*relay.ask(int(index), self.rfile.read(int(length))))

    def _answer(self, status: int, body: bytes) -> None:
        with contextlib.suppress(OSError):  # the asker was stopped meanwhile
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass
