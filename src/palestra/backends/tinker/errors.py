"""What the Tinker SDK raises: what a new session can repair, and the rest as sentences."""

from __future__ import annotations

import asyncio
from typing import Any

import tinker
from tinker.types import RequestErrorCategory

from palestra.core.errors import PalestraError

_LOST = (404, 408, 409, 410, 429)  # unknown to the server, or still busy after all of the SDK's retries


def is_lost(error: Exception) -> bool:
    """Whether the session or the server is at fault, rather than the request."""
    status = _status_error(error)
    if status is not None:
        return status.status_code in _LOST or status.status_code >= 500
    if isinstance(error, tinker.RequestFailedError):
        return error.category is not RequestErrorCategory.User
    # a promise that has expired; the class is not public
    is_expired = type(error).__name__ == "RetryableException"
    return is_expired or isinstance(error, tinker.APIConnectionError | asyncio.TimeoutError)


def is_unknown(error: Exception) -> bool:
    """Whether the server does not know what the request is about."""
    status = _status_error(error)
    return status is not None and status.status_code == 404


def refusal(error: Exception) -> Exception:
    """A sentence in place of an error of the SDK; any other error as it is."""
    if isinstance(error, PalestraError):
        return error
    status = _status_error(error)
    if isinstance(status, tinker.AuthenticationError | tinker.PermissionDeniedError):
        return PalestraError(f"the Tinker server does not accept the key in TINKER_API_KEY: {_detail(status)}")
    if status is not None:
        return PalestraError(f"the Tinker server answers {status.status_code}: {_detail(status)}")
    if isinstance(error, tinker.RequestFailedError):
        text = error.message.removeprefix("Request failed: ").partition(" for self.request_id")[0]
        return PalestraError(f"the Tinker server refuses a request: {text}")
    if isinstance(error, tinker.TinkerError):
        return PalestraError(f"Tinker: {error}")
    return error


def _status_error(error: Exception) -> tinker.APIStatusError | None:
    """The HTTP status behind an error: futures raise ValueError from it."""
    for found in (error, error.__cause__):
        if isinstance(found, tinker.APIStatusError):
            return found
    return None


def _detail(error: tinker.APIStatusError) -> str:
    """The sentence in an answer's body: {"detail": …}, or {"error": {"message": …}}."""
    found: Any = error.body
    while isinstance(found, dict):
        found = next((found[key] for key in ("detail", "error", "message") if key in found), str(found))
    return str(found or error.message)
