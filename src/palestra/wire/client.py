"""HTTP to a trajectory API: for the trainer and for our own environments."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.run_folder import RunFolder

_RETRY_S = 1.0
_GIVE_UP_S = 600.0


class ApiUnreachable(PalestraError):
    """The trajectory API cannot be reached, and was waited for."""


@dataclass(frozen=True, slots=True)
class WireClient:
    """HTTP to a trajectory API. One that is away or has no room for a while is waited for."""

    url: str
    token: str | None = None
    give_up_s: float = _GIVE_UP_S
    gone_s: float | None = None  # while it does not answer at all; give_up_s unless given

    async def register(self, config: RunConfig, starting_step: int, context_tokens: int, folder: RunFolder) -> None:
        body = {
            "wandb_group": config.track.run_name or folder.path.name,
            "wandb_project": config.track.project,
            "batch_size": config.train.problems_per_step * config.rollout.group_size,
            "max_token_len": context_tokens,
            "checkpoint_dir": str(folder.env_checkpoints.resolve()),  # by it the API knows a resumed run
            "save_checkpoint_interval": config.checkpoint.every,
            "starting_step": starting_step,
            "num_steps": config.train.max_steps,
        }
        await self.ask("/register", body)

    async def batch(self, after: int, saved: int | None = None) -> tuple[int, list[dict[str, Any]]] | None:
        """The batch behind number `after`, with its own number; None while there is none.

        The API keeps batches behind `saved` (`after` unless given), so that a trainer that is killed gets them again.
        """
        answer = await self.ask(f"/batch?after={after}" + ("" if saved is None else f"&saved={saved}"))
        groups = answer.get("batch")
        return (int(answer.get("number", after + 1)), groups) if groups else None

    async def ask(
        self, path: str, body: Mapping[str, Any] | None = None, *, method: str | None = None, key: str | None = None
    ) -> dict[str, Any]:
        """The answer; `key` lets a post that is repeated here count once there."""
        began = time.monotonic()
        request = self._request(path, body, method, key)
        while True:
            pause_s, limit_s = _RETRY_S, self.give_up_s
            try:
                return await asyncio.to_thread(_answer, request)
            except urllib.error.HTTPError as error:
                failure = PalestraError(f"{self.url}{path} answered {error.code}: {_text(error)}")
                if error.code != 429 and error.code < 500:
                    raise failure from None
                pause_s = _retry_after_s(error)
            except (OSError, ValueError, http.client.HTTPException) as error:
                start = "Start it with: palestra trajectory"
                failure = ApiUnreachable(f"{self.url}{path} cannot be asked: {error}. {start}")
                limit_s = self.give_up_s if self.gone_s is None else self.gone_s
            if time.monotonic() - began > limit_s:
                raise failure
            await asyncio.sleep(pause_s)

    def _request(
        self, path: str, body: Mapping[str, Any] | None, method: str | None, key: str | None
    ) -> urllib.request.Request:
        headers = {"Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        if key:
            headers["Idempotency-Key"] = key
        data = None if body is None else json.dumps(body).encode()
        return urllib.request.Request(f"{self.url.rstrip('/')}{path}", data, headers, method=method)


def _answer(request: urllib.request.Request) -> dict[str, Any]:
    with urllib.request.urlopen(request, timeout=60) as response:
        return dict(json.loads(response.read()))


def _text(error: urllib.error.HTTPError) -> str:
    return error.read(300).decode(errors="replace")


def _retry_after_s(error: urllib.error.HTTPError) -> float:
    said = error.headers.get("Retry-After") or ""
    return min(float(said), 60.0) if said.isdecimal() else _RETRY_S
