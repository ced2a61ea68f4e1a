"""A running vLLM as a Policy: token ids in and out over HTTP, weights by files that both can read."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from palestra.core.errors import PalestraError, RolloutError
from palestra.core.http import ConcurrencyLimit, HttpError, Request, Retries, ask, ask_async
from palestra.core.types import SamplingParams, Turn
from palestra.core.weights import Weights
from palestra.policy.token_sessions import TokenSession, TokenSessions
from palestra.policy.vllm_forms import (
    PROBE_TEXT,
    PROBE_TOKENS,
    check_agreement,
    fields_within,
    no_room,
    sampling_fields,
    turn_of,
)

log = logging.getLogger("palestra")
_MAX_REPLY_BYTES = 2**28
_START_S = 10.0  # how long a server may be away before a run begins
_SERVE = (
    "Start it with VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs --worker-extension-cls "
    "palestra.policy.vllm_worker.PalestraWorker (docs/scaling.md)"
)


class VllmServerPolicy(TokenSessions):
    """Samples by `/v1/completions`. Its prefix cache makes the turns of a conversation cheap.

    New weights are loaded from disk by `/collective_rpc`, between `/pause` and `/resume`, so that requests under way
    wait and go on with them. `temperature` is the one of training: the logprobs are compared at it.
    """

    def __init__(
        self,
        url: str,
        tokenizer: Any,
        *,
        weights_folder: Path,
        temperature: float,
        token: str | None = None,
        timeout_s: float = 300.0,
        max_concurrent: int = 256,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.version = 0
        self._tokenizer = tokenizer
        self._weights_folder = weights_folder.resolve()
        self._temperature = temperature
        self._token = token
        self._timeout_s = timeout_s
        self._limit = ConcurrencyLimit(max_concurrent)
        self._model, self._context = self._served_model()
        self._probe_ids = self._check_tokenizer()
        self._reload = "palestra_reload" if self._has_extension() else "reload_weights"

    async def sample(self, session: TokenSession, params: SamplingParams) -> Turn:
        version, ids = self.version, session.token_ids
        fields = fields_within(self._context, ids, params)
        if fields is None:
            return no_room(version)
        body = fields | {"model": self._model, "prompt": ids, "return_token_ids": True}
        retries = Retries(busy_s=self._timeout_s, unreachable_s=self._timeout_s)
        try:
            async with self._limit.slot():
                turn = read_completion(await ask_async(self._request("/v1/completions", body), retries), version)
        except HttpError as error:
            if error.is_retryable:  # no attempt can succeed without it: the run ends, rather than its rollouts
                raise ConnectionError(f"vLLM was lost for {self._timeout_s:g} s (vllm.timeout_s): {error}") from None
            raise RolloutError(str(error)) from None
        ids += turn.token_ids.tolist()
        return turn

    def update(self, weights: Weights) -> None:
        """Give the server these weights, and see by the logprobs of a few tokens that it samples with them."""
        folder = self._weights_folder / f"version-{weights.version}"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            weights.save(folder / "model.safetensors")
            self._tell("/pause?mode=keep")
            try:
                self._tell("/collective_rpc", {"method": self._reload, "kwargs": {"weights_path": str(folder)}})
                self._tell("/reset_prefix_cache?reset_running_requests=true")
            finally:
                self._tell("/resume")
        except HttpError as error:
            raise PalestraError(
                f"{self.url} did not take new weights: {error}. Restart it, as they may be half loaded. {_SERVE}"
            ) from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self.version = weights.version
        self._check(weights)

    def sleep(self) -> None:
        """Give the KV cache's memory back; the weights go to the host's memory meanwhile."""
        self._control("/sleep?level=1", "--enable-sleep-mode")

    def wake(self) -> None:
        self._control("/wake_up", "--enable-sleep-mode")

    def _control(self, path: str, option: str) -> None:
        try:
            self._tell(path)
        except HttpError as error:
            raise PalestraError(
                f"{error}. model.sleep_mode needs a GPU and a vLLM that was started with {option}; or set it to false"
            ) from None

    def _served_model(self) -> tuple[str, int]:
        """Its name at the server, and how many tokens it takes."""
        try:
            request = self._request("/v1/models", None)
            [model, *_] = ask(request, Retries(busy_s=_START_S, unreachable_s=_START_S))["data"]
            return str(model["id"]), int(model["max_model_len"])
        except HttpError as error:
            raise PalestraError(f"no vLLM answers at vllm.url: {error}. {_SERVE}") from None
        except (KeyError, TypeError, ValueError):
            raise PalestraError(
                f"{self.url}/v1/models is not that of a vLLM server; give its address as vllm.url"
            ) from None

    def _check_tokenizer(self) -> list[int]:
        """The ids of the probe text, which must be the same on both sides."""
        own = [int(i) for i in self._tokenizer(PROBE_TEXT, add_special_tokens=False).input_ids]
        body = {"model": self._model, "prompt": PROBE_TEXT, "add_special_tokens": False}
        try:
            theirs = self._ask("/tokenize", body)["tokens"]
        except HttpError as error:
            raise PalestraError(f"{self.url} tokenises nothing: {error}. {_SERVE}") from None
        if theirs != own:
            raise PalestraError(
                f"{self.url} serves {self._model!r} with another tokenizer: a text of {len(own)} tokens here has "
                f"{len(theirs)} there, or others. Let it serve the model that is trained"
            )
        return own

    def _has_extension(self) -> bool:
        try:
            self._tell("/collective_rpc", {"method": "palestra_version"})
            return True
        except HttpError as error:
            if error.status == 404:
                raise PalestraError(f"{self.url} takes no weights: it has no /collective_rpc. {_SERVE}") from None
            return False

    def _check(self, weights: Weights) -> None:
        params = SamplingParams(PROBE_TOKENS, temperature=self._temperature, seed=weights.version)
        session = self.open(self._probe_ids)
        body = sampling_fields(params) | {"model": self._model, "prompt": session.token_ids, "return_token_ids": True}
        turn = read_completion(self._ask("/v1/completions", body), self.version)
        gap = check_agreement(turn, self._probe_ids, weights, self._temperature, f"vLLM at {self.url}")
        log.info("vLLM samples version %d; mean gap of logprobs on the probe %.2g", weights.version, gap)

    def _tell(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """Some versions of vLLM answer a command with nothing."""
        request = self._request(path, body if body is not None else {})
        request.check(request.send())

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        retries = Retries(attempts=1)
        return ask(self._request(path, body if body is not None else {}), retries)

    def _request(self, path: str, body: Mapping[str, Any] | None) -> Request:
        return Request(
            f"{self.url}{path}", body, token=self._token, timeout_s=self._timeout_s, max_bytes=_MAX_REPLY_BYTES
        )


def read_completion(answer: Any, version: int) -> Turn:
    """
    >>> choice = {"token_ids": [7], "logprobs": {"token_logprobs": [-0.5]}, "finish_reason": "stop"}
    >>> read_completion({"choices": [choice]}, 3).versions.tolist()
    [3]
    """
    try:
        choice = answer["choices"][0]
        ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        finish = choice["finish_reason"]
    except (KeyError, IndexError, TypeError) as error:
        raise RolloutError(
            f"/v1/completions gave no token ids with logprobs ({type(error).__name__}: {error}); use vLLM 0.10 or newer"
        ) from None
    return turn_of(ids, logprobs, version, finish)
