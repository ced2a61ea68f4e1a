"""A running vLLM as a Policy: token ids in and out over HTTP, weights or adapters by files that both can read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from palestra.backends.vllm.forms import PROBE_TEXT, PROBE_TOKENS, check_agreement, sampling_fields, turn_of
from palestra.backends.vllm.sync import LoraAdapters, VllmServer, WeightSync, WholeWeights
from palestra.core.errors import PalestraError, RolloutError
from palestra.core.http import ConcurrencyLimit, HttpError, Retries, ask_async
from palestra.core.types import SamplingParams, Turn
from palestra.core.weights import Weights
from palestra.policy.token_sessions import BoundedSessions

log = logging.getLogger("palestra")
_START_S = 10.0  # how long a server may be away before a run begins


class VllmServerPolicy(BoundedSessions):
    """Samples by `/v1/completions`. Its prefix cache makes the turns of a conversation cheap.

    With `lora_rank` it is given adapters of that rank, else whole weights. `temperature` is the one of training: the
    logprobs are compared at it.
    """

    def __init__(
        self,
        url: str,
        tokenizer: Any,
        *,
        weights_folder: Path,
        temperature: float,
        lora_rank: int = 0,
        max_staleness: int = 0,
        token: str | None = None,
        timeout_s: float = 300.0,
        max_concurrent: int = 256,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.version = 0
        self._tokenizer = tokenizer
        self._temperature = temperature
        self._timeout_s = timeout_s
        self._limit = ConcurrencyLimit(max_concurrent)
        self._server = server = VllmServer(self.url, token, timeout_s)
        self._sync: WeightSync = (
            LoraAdapters(server, weights_folder, lora_rank, max_staleness)
            if lora_rank
            else WholeWeights(server, weights_folder)
        )
        self.served_model, self._context = self._base_model()  # what requests name: the model, or its last adapter
        self._probe_ids = self._check_tokenizer()
        self._sync.check()

    async def _sample(self, ids: list[int], params: SamplingParams) -> Turn:
        version = self.version
        request = self._server.request("/v1/completions", self._completion(ids, params))
        retries = Retries(busy_s=self._timeout_s, unreachable_s=self._timeout_s)
        try:
            async with self._limit.slot():
                return read_completion(await ask_async(request, retries), version)
        except HttpError as error:
            if error.is_retryable:  # no attempt can succeed without it: the run ends, rather than its rollouts
                raise ConnectionError(f"vLLM was lost for {self._timeout_s:g} s (vllm.timeout_s): {error}") from None
            if error.status == 404:
                raise ConnectionError(f"vLLM has lost the model, as by a restart: {error}. Resume the run") from None
            raise RolloutError(str(error)) from None

    def update(self, weights: Weights) -> None:
        """Give the server these weights, and see by the logprobs of a few tokens that it samples with them."""
        try:
            self.served_model = self._sync.load(weights) or self.served_model
        except OSError as error:
            raise PalestraError(
                f"version {weights.version} could not be saved to rollout.weights_folder: {error}; free some space, or "
                "choose another folder that the server can read"
            ) from error
        self.version = weights.version
        self._check(weights)

    def release(self) -> None:
        self._sync.release()

    def sleep(self) -> None:
        """Give the KV cache's memory back; the weights go to the host's memory meanwhile."""
        self._control("/sleep?level=1", "--enable-sleep-mode")

    def wake(self) -> None:
        self._control("/wake_up", "--enable-sleep-mode")

    def _control(self, path: str, option: str) -> None:
        try:
            self._server.tell(path)
        except HttpError as error:
            raise PalestraError(
                f"{error}. model.sleep_mode needs a GPU and a vLLM that was started with {option}; or set it to false"
            ) from None

    def _base_model(self) -> tuple[str, int]:
        """Its name at the server, and how many tokens it takes."""
        try:
            answer = self._server.ask("/v1/models", None, Retries(busy_s=_START_S, unreachable_s=_START_S))
            [model, *_] = answer["data"]  # adapters come after it
            return str(model["id"]), int(model["max_model_len"])
        except HttpError as error:
            raise PalestraError(f"no vLLM answers at vllm.url: {error}. Start it with {self._sync.start}") from None
        except (KeyError, TypeError, ValueError):
            raise PalestraError(
                f"{self.url}/v1/models is not that of a vLLM server; give its address as vllm.url"
            ) from None

    def _check_tokenizer(self) -> list[int]:
        """The ids of the probe text, which must be the same on both sides."""
        own = [int(i) for i in self._tokenizer(PROBE_TEXT, add_special_tokens=False).input_ids]
        body = {"model": self.served_model, "prompt": PROBE_TEXT, "add_special_tokens": False}
        try:
            theirs = self._server.ask("/tokenize", body)["tokens"]
        except HttpError as error:
            raise PalestraError(f"{self.url} tokenises nothing: {error}. Start it with {self._sync.start}") from None
        if theirs != own:
            raise PalestraError(
                f"{self.url} serves {self.served_model!r} with another tokenizer: a text of {len(own)} tokens here has "
                f"{len(theirs)} there, or others. Let it serve the model that is trained"
            )
        return own

    def _check(self, weights: Weights) -> None:
        params = SamplingParams(PROBE_TOKENS, temperature=self._temperature, seed=weights.version)
        body = self._completion(self._probe_ids, params)
        turn = read_completion(self._server.ask("/v1/completions", body), self.version)
        remedy = f"Let it serve the model that is trained: {self._sync.start}"
        gap = check_agreement(turn, self._probe_ids, weights, self._temperature, f"vLLM at {self.url}", remedy)
        log.info("vLLM samples version %d; mean gap of logprobs on the probe %.2g", weights.version, gap)

    def _completion(self, ids: Sequence[int], params: SamplingParams) -> dict[str, Any]:
        named = {"model": self.served_model, "prompt": ids, "return_token_ids": True}
        return sampling_fields(params) | named


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
