"""Whether the hub can be asked: found out in seconds, not by retries."""

from __future__ import annotations

import os
import threading
import urllib.error
import urllib.request

_PATIENCE_S = 4.0
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def unreachable() -> str | None:
    """Why the hub cannot be asked; None when it answers."""
    for variable in _OFFLINE:
        if os.environ.get(variable, "").upper() in ("1", "ON", "YES", "TRUE"):
            return f"{variable} is set"
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    answers: list[str | None] = []
    # in a thread, for looking up a name may take longer than any timeout says
    asking = threading.Thread(target=lambda: answers.append(_ask(endpoint)), daemon=True)
    asking.start()
    asking.join(_PATIENCE_S)
    return answers[0] if answers else f"{endpoint} does not answer within {_PATIENCE_S:g} s"


def _ask(endpoint: str) -> str | None:
    try:
        urllib.request.urlopen(urllib.request.Request(endpoint, method="HEAD"), timeout=_PATIENCE_S).close()
    except urllib.error.HTTPError:
        return None  # it answers, if not with what was asked for
    except (OSError, ValueError) as error:
        return f"{endpoint} cannot be reached ({getattr(error, 'reason', error)})"
    return None
