"""Errors as HTTP answers: the status, and the message in OpenAI's JSON form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from palestra.core.errors import PalestraError, text_of

_MAX_MESSAGE = 2000  # characters: it may quote what was sent

ErrorForm = Callable[[Request, int, str], dict[str, Any]]


def refuse(status: int, message: str, *, retry_after_s: int | None = None) -> HTTPException:
    """The error that becomes an OpenAI-style JSON answer."""
    headers = None if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return HTTPException(status, message, headers)


def error_response(request: Request, error: Exception, error_form: ErrorForm) -> Response:
    if isinstance(error, HTTPException):
        return JSONResponse(error_form(request, error.status_code, error.detail), error.status_code, error.headers)
    status = 400 if isinstance(error, PalestraError) else 500
    return JSONResponse(error_form(request, status, text_of(error)), status)


def error_body(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": shortened(message), "type": kind, "param": None, "code": status}}


def shortened(message: str) -> str:
    return message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]} …"
