"""Access control: clients with the token; without a token, local programs only."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from palestra.core.http import is_loopback
from palestra.servers.http_errors import error_body


class Guard:
    """Checks the token; without one, refuses requests of web pages.

    A server on the loopback address can be reached by every page that a local browser shows. Such requests
    carry an Origin of their own, or are marked by the browser as another site's (`<img>`, links and forms have
    no Origin), or have a host name that was made to point here.

    Paths of `has_own_key` are not asked for the token: the application checks a key of its own there.
    """

    def __init__(
        self, app: ASGIApp, token: str | None, has_own_key: Callable[[str], bool] = lambda path: False
    ) -> None:
        self._app = app
        self._token = token
        self._has_own_key = has_own_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers = dict(reversed(scope["headers"]))  # of several the first counts
        if self._token:
            sent = headers.get(b"authorization") or headers.get(b"x-api-key", b"")
            is_token = hmac.compare_digest(sent.removeprefix(b"Bearer "), self._token.encode())
            if is_token or self._has_own_key(scope["path"]):
                return None
            how = "send it as 'Authorization: Bearer TOKEN' (or X-API-Key)"
            return refusal(401, f"the token is missing or wrong; {how}")
        if _is_loopback_host(headers.get(b"host", b"localhost")) and _from_no_other_site(headers):
            return None
        return refusal(403, "without a token, only requests to a loopback address and from no other site are answered")


def refusal(status: int, message: str) -> JSONResponse:
    return JSONResponse(error_body(status, message), status)


def _from_no_other_site(headers: Mapping[bytes, bytes]) -> bool:
    site = headers.get(b"sec-fetch-site", b"none")
    if origin := headers.get(b"origin"):
        # accept pages of other loopback ports, unless the browser reports them as cross-site
        return is_loopback(host_of(origin.decode("latin-1"))) and site != b"cross-site"
    return site in (b"none", b"same-origin")


def host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


@lru_cache(256)
def _is_loopback_host(header: bytes) -> bool:
    """Cached, since the Host header is the same in every request of a client."""
    return is_loopback(host_of(f"//{header.decode('latin-1')}"))
