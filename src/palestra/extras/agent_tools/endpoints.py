"""The models of rl_test_inference (at an endpoint, at a local server, or loaded here), and the relay to an endpoint.

The relay runs between an environment's process and the endpoint: it holds the key, and counts tokens and their cost.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from palestra.core.errors import InputError, NotAllowedError, SettingError
from palestra.core.http import HttpError, Request
from palestra.extras.agent_tools.answers import short
from palestra.extras.agent_tools.locks import Site, is_hub_name

OPENROUTER = "https://openrouter.ai/api/v1"
OPENROUTER_MODELS = ("qwen/qwen3-8b", "z-ai/glm-4.7-flash", "minimax/minimax-m2.7")
_SCALES = dict(zip(OPENROUTER_MODELS, ("small", "medium", "large"), strict=True))
_MAX_NAME_CHARS = 300
_MAX_BODY_BYTES = 50_000_000
_MAX_REPLY_BYTES = 50_000_000


@dataclass(frozen=True)
class Candidate:
    """A model to test. Without a URL it is loaded here."""

    label: str  # as it was asked for
    name: str
    base_url: str | None = None
    api_key_env: str | None = None

    @property
    def scale(self) -> str | None:
        """small, medium or large, of the models that are tested by default."""
        return _SCALES.get(self.name)

    @property
    def more(self) -> dict[str, Any]:
        """Additional fields of every request: OpenRouter reports the cost on request."""
        return {"usage": {"include": True}} if self.base_url == OPENROUTER else {}


def choose_models(
    models: Sequence[str] | None, site: Site, current: str, environ: Mapping[str, str] = os.environ
) -> list[Candidate]:
    """The models that were named, or those that this site or its keys suggest, or the one to be trained."""
    url, key, usual = _endpoint(site, environ)
    names = list(models) if models else usual or [f"local:{current}"]
    if len(names) > site.limits.test_models:
        raise NotAllowedError(f"{len(names)} models were named; at most {site.limits.test_models} are tested together")
    if len(set(names)) != len(names):
        raise SettingError("a model is named twice; name each once")
    candidates = [_candidate(name, url, key) for name in names]
    paths = [c.label for c in candidates if models and c.base_url is None and not is_hub_name(c.name)]
    if paths and "model.name" not in site.unlock:
        raise NotAllowedError(
            f"{short(paths[0])}: only models of the hub can be named here, such as local:Qwen/Qwen3-0.6B; "
            "the site file allows paths with unlock: [model.name]"
        )
    return candidates


def _endpoint(site: Site, environ: Mapping[str, str]) -> tuple[str | None, str | None, list[str]]:
    """Its URL, the name of its key's variable, and the models to take when none are named."""
    inference = site.inference
    if inference.base_url:
        return inference.base_url, inference.api_key_env, inference.models
    if environ.get("OPENROUTER_API_KEY"):
        return OPENROUTER, "OPENROUTER_API_KEY", inference.models or list(OPENROUTER_MODELS)
    if environ.get("OPENAI_BASE_URL"):
        return environ["OPENAI_BASE_URL"], "OPENAI_API_KEY", inference.models
    return None, None, inference.models


def _candidate(label: str, url: str | None, key: str | None) -> Candidate:
    name, at, place = label.rpartition("@http")
    if not label.strip() or len(label) > _MAX_NAME_CHARS or not label.isprintable():
        raise InputError(f"{short(label)!r} is not the name of a model")
    if at:
        if urlsplit(f"http{place}").hostname not in ("127.0.0.1", "localhost", "::1"):
            raise NotAllowedError(
                f"{short(label)}: only a server on this machine can be named here; for another one, set "
                "inference.base_url in the site file, or OPENAI_BASE_URL"
            )
        return Candidate(label, name, f"http{place}")  # without a key
    if label.startswith("local:"):
        return Candidate(label, label.removeprefix("local:"))
    if label.startswith("palestra/") or (label.startswith(("/", "./", "~")) and Path(label).expanduser().exists()):
        return Candidate(label, label)
    if url is None:
        raise SettingError(
            f"nothing says where {short(label)} is: set OPENROUTER_API_KEY, or OPENAI_BASE_URL and OPENAI_API_KEY, "
            f"for an endpoint; write local:{short(label)} to load it here, or {short(label)}@http://127.0.0.1:8000/v1 "
            "for a server on this machine"
        )
    return Candidate(label, label, url, key)


class Relay(ThreadingHTTPServer):
    """A server on a loopback port for one model at an endpoint, with a token of its own. It counts what is used."""

    daemon_threads = True

    def __init__(self, model: Candidate, timeout_s: float, max_completions: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"
        self.token = secrets.token_urlsafe(24)
        self.requests = self.prompt_tokens = self.completion_tokens = 0
        self.cost_usd: float | None = None  # until an answer names a cost
        self._model, self._timeout_s, self._completions_left = model, timeout_s, max_completions
        self._max_completions = max_completions
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def running(self) -> Iterator[Relay]:
        threading.Thread(target=self.serve_forever, name="palestra-relay", daemon=True).start()
        try:
            yield self
        finally:
            self.shutdown()
            self.server_close()

    def ask(self, body: bytes) -> tuple[int, bytes]:
        """Forward a request, which may only ask for the tested model, and count its usage."""
        try:
            request = json.loads(body)
        except (ValueError, RecursionError):
            request = None
        if not isinstance(request, dict):
            return 403, _error("the body is not a JSON object")
        if request.get("model") != self._model.name:
            return 403, _error(f"this is a test of {self._model.name}; another model is not asked")
        count = request.get("n") or 1
        if not isinstance(count, int) or count < 1 or not self._reserve(count):
            return 403, _error(f"n={short(count)}: this test may ask for {self._max_completions} completions in all")
        status, reply = self._post(request)
        self._count(reply if status == 200 else b"")
        return status, reply

    def _reserve(self, completions: int) -> bool:
        """Reserve completions; return False without counting if that would exceed the limit."""
        with self._lock:
            is_enough = completions <= self._completions_left
            self._completions_left -= completions if is_enough else 0
            return is_enough

    def _count(self, reply: bytes) -> None:
        """Count an answered request, with the usage that the answer reports."""
        try:
            usage = dict(json.loads(reply)["usage"])
        except (ValueError, KeyError, TypeError):
            usage = {}
        cost = usage.get("cost")
        with self._lock:
            self.requests += 1
            for name in ("prompt_tokens", "completion_tokens"):
                if type(count := usage.get(name)) is int and count > 0:
                    setattr(self, name, getattr(self, name) + count)
            if isinstance(cost, int | float) and not isinstance(cost, bool):
                self.cost_usd = (self.cost_usd or 0.0) + cost

    def _post(self, request: dict[str, Any]) -> tuple[int, bytes]:
        model = self._model
        key = os.environ.get(model.api_key_env) if model.api_key_env else None  # read for each request
        url = f"{(model.base_url or '').rstrip('/')}/chat/completions"
        body = {**request, **model.more}
        try:
            reply = Request(url, body, token=key, timeout_s=self._timeout_s, max_bytes=_MAX_REPLY_BYTES).send()
        except HttpError as error:
            return 502, _error(str(error))
        return reply.status, reply.body


def _error(message: str) -> bytes:
    return json.dumps({"error": {"message": message}}).encode()


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        relay = cast(Relay, self.server)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        length = self.headers.get("Content-Length", "")
        if not hmac.compare_digest(token.encode(), relay.token.encode()):
            self._answer(401, _error("the token is wrong"))
        elif not (length.isdecimal() and int(length) <= _MAX_BODY_BYTES):
            self._answer(413, _error("the body is too large"))
        elif self.path != "/v1/chat/completions":
            self._answer(404, _error("there is nothing at this path"))
        else:
            self._answer(*relay.ask(self.rfile.read(int(length))))

    def _answer(self, status: int, body: bytes) -> None:
        with contextlib.suppress(OSError):  # the environment was stopped while it waited
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass
