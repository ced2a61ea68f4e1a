"""What an application has answered and refused: clients often do not log the reason."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send


@dataclass(slots=True)
class Tally:
    """How many posts an application has answered, refused and is working on, and why it refused the last."""

    answered: int = 0
    refused: int = 0
    running: int = 0
    reason: str = ""


class TallyMiddleware:
    """Keeps the tally of an application. 499 (the client is gone) and 5xx (it will try again) count as neither."""

    def __init__(self, app: ASGIApp, tally: Tally) -> None:
        self._app = app
        self._tally = tally

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 0

        async def counting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._tally.answered += status < 400
                self._tally.refused += 400 <= status < 499
            elif 400 <= status < 499 and message.get("body"):
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    self._tally.reason = f"{scope['path']}: {json.loads(message['body'])['error']['message']}"
            await send(message)

        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        self._tally.running += 1
        try:
            await self._app(scope, receive, counting)
        finally:
            self._tally.running -= 1
