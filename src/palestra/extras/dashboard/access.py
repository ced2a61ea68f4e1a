"""Access control of the dashboard: this machine, or clients with the token; never pages of other sites."""

from __future__ import annotations

import hmac

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from palestra.core.http import is_loopback
from palestra.servers.guard import host_of
from palestra.servers.http_errors import error_body

COOKIE = "palestra_token"
# Scripts and styles come from this server alone, so that what a model wrote cannot run even where it is not escaped.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "font-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_SAFE = ("GET", "HEAD")


class Access:
    """Checks Host, Origin, Sec-Fetch-Site and the token of every request, and adds the security headers.

    A browser cannot send a token with a link or an EventSource: `?token=…` is exchanged for a cookie once.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        answer = self._refusal(Request(scope)) or self._exchange(Request(scope))
        await (answer or self._app)(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        if not _is_own_page(request):
            return _error(403, "requests of other sites are not answered; open the dashboard itself")
        if request.method not in _SAFE and "json" not in request.headers.get("content-type", ""):
            return _error(415, "send Content-Type: application/json")
        if self._token is None:
            host = host_of(f"//{request.headers.get('host', '')}")
            return None if is_loopback(host) else _error(403, f"the host {host[:80]!r} is not this machine")
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if any(self._is_token(text) for text in (bearer, request.cookies.get(COOKIE, ""), _asked(request))):
            return None
        return _error(401, "the token is missing or wrong; open the address that `palestra dashboard` printed")

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), (self._token or "").encode())

    def _exchange(self, request: Request) -> Response | None:
        """The page without the token in its address, which a history or a screenshot would keep."""
        if self._token is None or request.method != "GET" or not self._is_token(_asked(request)):
            return None
        answer = Response(status_code=303, headers={"Location": "./"})
        answer.set_cookie(
            COOKIE, self._token, httponly=True, samesite="strict", path=request.scope.get("root_path") or "/"
        )
        return answer


def _is_own_page(request: Request) -> bool:
    """Whether no other site asks: by the Origin, which must be this server, and the browser's Sec-Fetch-Site."""
    origin, host = request.headers.get("origin"), request.headers.get("host", "")
    if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
        return False
    return request.headers.get("sec-fetch-site", "none") in ("none", "same-origin")


def _asked(request: Request) -> str:
    return request.query_params.get("token", "")


def _error(status: int, message: str) -> Response:
    return JSONResponse(error_body(status, message), status)
