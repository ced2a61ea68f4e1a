"""Whether the Hugging Face hub can be reached, found out in seconds instead of by retries."""

from __future__ import annotations

import os
import threading

from palestra.core.http import HttpError, Request

_TIMEOUT_S = 4.0
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def unreachable() -> str | None:
    """Why the hub cannot be reached; None if it answers."""
    for variable in _OFFLINE:
        if os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE"):
            return f"{variable} is set"
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    results: list[str | None] = []
    # in a thread, because a DNS lookup may take longer than the timeout of the request
    thread = threading.Thread(target=lambda: results.append(_request(endpoint)), daemon=True)
    thread.start()
    thread.join(_TIMEOUT_S)
    return results[0] if results else f"{endpoint} does not answer within {_TIMEOUT_S:g} s"


def _request(endpoint: str) -> str | None:
    try:
        Request(endpoint, method="HEAD", timeout_s=_TIMEOUT_S).send()  # an error status is an answer too
    except HttpError as error:
        return f"{endpoint} cannot be reached ({error.reason})"
    return None
