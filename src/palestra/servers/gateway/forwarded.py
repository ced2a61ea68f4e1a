"""An agent of an attempt whose model is elsewhere: its requests are passed on, with a key that it never sees."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import Response

from palestra.core import http
from palestra.servers.body import MIB, read_body
from palestra.servers.forwarding import SILENCE_S, forward, passed_headers
from palestra.servers.http_errors import refuse

_MAX_BODY = 64 * MIB
_KEYS = ("Authorization", "X-Api-Key", "Api-Key")


@dataclass(eq=False)
class ForwardedAgent:
    """One agent of one attempt. Nothing is recorded, and nothing trained."""

    gateway_url: str
    upstream: str  # up to /v1
    model: str | None = None  # replaces the name in the requests
    key: str | None = field(default=None, repr=False)
    on_end: Callable[[ForwardedAgent], None] = lambda agent: None
    id: str = field(default_factory=lambda: secrets.token_urlsafe(16), init=False)
    api_key: str = field(default_factory=lambda: f"sk-palestra-{secrets.token_urlsafe(24)}", init=False, repr=False)

    @property
    def base_url(self) -> str:
        return f"{self.gateway_url}/attempt/{self.id}/v1"

    async def forward(self, request: Request) -> Response:
        """The upstream's answer to this request."""
        _, found, path = request.url.path.partition("/v1/")
        if not found:
            raise refuse(404, "this agent's model is elsewhere; only requests below /v1 are passed on")
        body = self._with_model(await read_body(request, _MAX_BODY))
        url = f"{self.upstream.rstrip('/').removesuffix('/v1')}/v1/{path}"
        asked = http.Request(
            url, body or None, request.method, headers=self._headers(request.headers), timeout_s=SILENCE_S
        )
        return await forward(asked)

    async def finish(self) -> None:
        """Refuse its key from now on."""
        self.on_end(self)

    def _headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        passed = {name: value for name, value in passed_headers(headers).items() if name not in _KEYS}
        if self.key is None:
            return passed
        return passed | {"Authorization": f"Bearer {self.key}", "X-Api-Key": self.key}

    def _with_model(self, body: bytes) -> bytes:
        if self.model is None or not body:
            return body
        try:
            fields = json.loads(body)
            return json.dumps({**fields, "model": self.model}).encode()
        except (ValueError, TypeError):
            raise refuse(400, "the body is not a JSON object") from None
