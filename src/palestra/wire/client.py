"""HTTP to a trajectory API: for the trainer and for our own environments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.http import HttpError, Request, Retries, ask_async
from palestra.core.run_folder import RunFolder

_GIVE_UP_S = 600.0
_MAX_BATCH_BYTES = 4 * 2**30


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
        gone_s = self.give_up_s if self.gone_s is None else self.gone_s
        request = Request(
            f"{self.url.rstrip('/')}{path}",
            body,
            method or "",
            self.token,
            {"Idempotency-Key": key} if key else {},
            max_bytes=_MAX_BATCH_BYTES,
        )
        try:
            return dict(await ask_async(request, Retries(busy_s=self.give_up_s, unreachable_s=gone_s)))
        except HttpError as error:
            if error.status is None:
                raise ApiUnreachable(f"{error}. Start it with: palestra trajectory") from None
            raise
