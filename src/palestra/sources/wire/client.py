"""HTTP to a trajectory API: for the trainer and for our own environments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.http import HttpError, Request, Retries, ask_async
from palestra.core.run_folder import RunFolder

_GIVE_UP_S = 600.0
_SLOW_S = 30.0  # after which a request without an answer is logged
_MAX_BATCH_BYTES = 4 * 2**30
_NOT_THIS_API = (200, 404, 405, 501)  # a page instead of JSON, or nothing at that path


@dataclass(frozen=True, slots=True)
class NoBatch:
    """There is none now; `reason` where the API knows what keeps it from making one."""

    reason: str = ""


class ApiUnreachable(PalestraError):
    """The trajectory API could not be reached for as long as the client waits."""


@dataclass(frozen=True, slots=True)
class WireClient:
    """HTTP to a trajectory API. Requests are repeated while it is away or has no room."""

    url: str
    token: str | None = None
    give_up_s: float = _GIVE_UP_S
    gone_s: float | None = None  # how long to repeat while it cannot be reached at all; None: give_up_s
    note: Callable[[str], None] = lambda text: None

    async def register(self, config: RunConfig, starting_step: int, context_tokens: int, folder: RunFolder) -> None:
        body = {
            "wandb_group": config.track.run_name or folder.path.name,
            "wandb_project": config.track.project,
            "batch_size": config.train.problems_per_step * config.rollout.group_size,
            "max_token_len": context_tokens,
            "checkpoint_dir": str(folder.env_checkpoints.resolve()),  # identifies the run when it is resumed
            "save_checkpoint_interval": config.checkpoint.every,
            "starting_step": starting_step,
            "num_steps": config.train.max_steps,
        }
        try:
            await self.call("/register", body)
        except HttpError as error:
            if error.status in _NOT_THIS_API:
                raise PalestraError(f"{error}. This is no trajectory API; `palestra trajectory` starts one") from None
            raise

    async def batch(
        self, after: int, saved: int | None = None, step: int | None = None
    ) -> tuple[int, list[dict[str, Any]]] | NoBatch:
        """The number and the groups of the batch that follows number `after`.

        The API keeps the batches that follow `saved` (default: `after`), so that a killed trainer gets them again.
        `step` is the trainer's, which environments end by.
        """
        asked = {"after": after, "saved": saved, "step": step}
        path = "/batch?" + "&".join(f"{name}={value}" for name, value in asked.items() if value is not None)
        try:
            answer = await self.call(path, method="POST")
        except HttpError as error:
            if error.status != 405:
                raise
            answer = await self.call(path)  # Atropos's own server knows GET alone
        if answer.get("status") == "error":
            raise PalestraError(f"{self.url}/batch: {answer.get('message')}. Was it reset during the run?")
        groups = answer.get("batch")
        return (int(answer.get("number", after + 1)), groups) if groups else NoBatch(answer.get("message") or "")

    async def call(
        self, path: str, body: Mapping[str, Any] | None = None, *, method: str | None = None, key: str | None = None
    ) -> dict[str, Any]:
        """The response; a post with a `key` counts once, however often it is repeated."""
        gone_s = self.give_up_s if self.gone_s is None else self.gone_s
        request = Request(
            f"{self.url.rstrip('/')}{path}",
            body,
            method or "",
            self.token,
            {"Idempotency-Key": key} if key else {},
            max_bytes=_MAX_BATCH_BYTES,
        )
        retries = Retries(busy_s=self.give_up_s, unreachable_s=gone_s)
        asking = asyncio.ensure_future(ask_async(request, retries))
        try:
            done, _ = await asyncio.wait({asking}, timeout=_SLOW_S)
            if not done:
                self.note(
                    f"{request.url} has given no answer for {_SLOW_S:.0f} s; it is asked again for {gone_s:.0f} s. "
                    "`palestra trajectory` starts such a server"
                )
            return dict(await asking)
        except HttpError as error:
            if error.status is None:
                raise ApiUnreachable(f"{error}. Start it with: palestra trajectory") from None
            raise
        finally:
            asking.cancel()
