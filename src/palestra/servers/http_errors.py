"""Errors as HTTP answers: the status, and the message in OpenAI's JSON form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from palestra.core.errors import ContextLengthError, PalestraError, text_of

_CODES = {
    401: "invalid_api_key",
    403: "permission_denied",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    429: "rate_limit_exceeded",
    503: "service_unavailable",
}
_MAX_MESSAGE = 2000  # characters: it may quote what was sent

ErrorForm = Callable[[Request, int, Exception | str], dict[str, Any]]  # the status, and the error or its text


def refuse(status: int, message: str, *, retry_after_s: int | None = None) -> HTTPException:
    """The error that becomes an OpenAI-style JSON answer."""
    headers = None if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return HTTPException(status, message, headers)


def refusal(status: int, message: str) -> JSONResponse:
    """The answer to a request that no handler sees."""
    return JSONResponse(error_body(status, message), status)


def error_body(status: int, error: Exception | str) -> dict[str, Any]:
    """An error in OpenAI's form. Its code is a text by which clients decide what to do, as they do with OpenAI's."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    code = _CODES.get(status, "invalid_request" if status < 500 else "server_error")
    if isinstance(error, PalestraError) and status == 400:
        code = error.code
    return {"error": {"message": message_of(error), "type": kind, "param": None, "code": code}}


def message_of(error: Exception | str) -> str:
    """The text of an error. A context that is full is reported in the words that agents look for.

    They are those of Anthropic ("prompt is too long") and OpenAI ("maximum context length is"), in both dialects:
    frameworks translate between them. An agent that recognises them shortens its history or stops instead of retrying.
    """
    message = error if isinstance(error, str) else text_of(error)
    if isinstance(error, ContextLengthError):
        size = "" if error.tokens is None else f"{error.tokens} tokens > {error.limit} maximum; "
        message = f"prompt is too long: {size}{message}. This model's maximum context length is {error.limit} tokens."
    return message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]} …"
