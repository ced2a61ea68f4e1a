"""A model behind an inference server, token by token: SGLang's `/generate` as a Policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from palestra.core.errors import RolloutError, SettingError
from palestra.core.http import ConcurrencyLimit, HttpError, Request, Retries, ask, ask_async
from palestra.core.types import Finish, SamplingParams, Turn
from palestra.core.weights import Weights
from palestra.policy.base import TokenSession, TokenSessions

_MAX_REPLY_BYTES = 2**30  # logprobs of a whole context


class RemotePolicy(TokenSessions):
    """Samples from a server in another process: ids, logprobs and versions are exactly the server's.

    The server may train its model itself, or take weights from us by files in `weights_folder`, which both can read.
    A server that is away or stands still (a trainer does during a step) is waited for; one that refuses a
    conversation fails that rollout. Whoever is cancelled hangs up, and the server stops sampling for it.
    """

    version: int = 0  # as of the last answer

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_s: float = 600.0,
        give_up_s: float = 600.0,
        max_concurrent: int = 128,
        weights_folder: Path | None = None,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._token = token
        self._timeout_s = timeout_s
        self._retries = Retries(busy_s=give_up_s, unreachable_s=give_up_s)
        self._weights_folder = weights_folder
        self._limit = ConcurrencyLimit(max_concurrent)

    async def model_name(self) -> str:
        """The model's name at the server."""
        answer = await self._ask("/v1/models")
        return str(answer["data"][0]["id"])

    async def sample(self, session: TokenSession, params: SamplingParams) -> Turn:
        fields = asdict(params) | {"top_k": params.top_k or -1}  # SGLang's word for "all"
        body = {"input_ids": session.token_ids, "sampling_params": fields, "return_logprob": True}
        sampled = read_sampled(await self._ask("/generate", body))
        self.version = int(sampled.versions[-1])
        session.token_ids += sampled.token_ids.tolist()
        return sampled

    def update(self, weights: Weights) -> None:
        if self._weights_folder is None:
            raise SettingError("a remote model gets its weights from its own trainer, not from this program")
        self._weights_folder.mkdir(parents=True, exist_ok=True)
        path = weights.save(self._weights_folder.resolve() / f"version-{weights.version}.safetensors")
        try:
            ask(self._request("/update_weights_from_disk", {"model_path": str(path)}), Retries(attempts=1))
        except HttpError as error:
            raise SettingError(f"{self.url} did not take new weights: {error}") from None
        finally:
            path.unlink(missing_ok=True)
        self.version = weights.version

    async def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        try:
            async with self._limit.slot():
                return await ask_async(self._request(path, body), self._retries)
        except HttpError as error:
            remedy = ". The trainer serves its model there (--serve-port)" if error.is_retryable else ""
            raise RolloutError(f"{error}{remedy}") from None

    def _request(self, path: str, body: Mapping[str, Any] | None) -> Request:
        return Request(
            f"{self.url}{path}", body, token=self._token, timeout_s=self._timeout_s, max_bytes=_MAX_REPLY_BYTES
        )


def read_sampled(answer: Any) -> Turn:
    """
    >>> about = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-0.5, 7, None]], "weight_version": "3"}
    >>> turn = read_sampled({"text": "x", "meta_info": about})
    >>> turn.token_ids.tolist(), turn.logprobs.tolist(), turn.versions.tolist(), turn.finish
    ([7], [-0.5], [3], 'stop')
    """
    try:
        about = answer["meta_info"]
        rows = about["output_token_logprobs"]
        finish = about["finish_reason"]["type"]
        ids, logprobs = [int(row[1]) for row in rows], [float(row[0]) for row in rows]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise RolloutError(f"/generate gave no tokens with logprobs: {type(error).__name__}: {error}") from None
    if finish not in ("stop", "length") or not ids:
        raise RolloutError(f"/generate ended with {finish!r} after {len(ids)} tokens; expected stop or length")
    last = str(about.get("weight_version", ""))
    versions = about.get("weight_versions") or (int(last) if last.isdecimal() else 0)
    return Turn("model", ids, logprobs, versions, cast(Finish, finish))  # type: ignore[arg-type]
