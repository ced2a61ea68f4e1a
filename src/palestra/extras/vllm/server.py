"""A running vLLM as a Policy: token ids in and out over HTTP, weights or adapters by files that both can read."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.core.errors import RolloutError, ServiceError, StorageError
from palestra.core.http import ConcurrencyLimit, HttpError, Request, Retries, ask, ask_async
from palestra.core.types import SamplingParams, Turn
from palestra.core.weights import Weights
from palestra.extras.vllm.common import (
    PROBE_TEXT,
    PROBE_TOKENS,
    Adapter,
    AdapterFolders,
    check_agreement,
    rank_limit,
    sampling_fields,
    turn_of,
)
from palestra.policy.base import BoundedSessions

log = logging.getLogger("palestra")
_MAX_REPLY_BYTES = 2**28
_ONCE = Retries(attempts=1)


@dataclass(frozen=True, slots=True)
class VllmServer:
    """A running vLLM: how it is asked. `url` is without /v1."""

    url: str
    token: str | None
    timeout_s: float

    def request(self, path: str, body: Mapping[str, Any] | None) -> Request:
        return Request(
            f"{self.url}{path}", body, token=self.token, timeout_s=self.timeout_s, max_bytes=_MAX_REPLY_BYTES
        )

    def ask(self, path: str, body: Mapping[str, Any] | None, retries: Retries = _ONCE) -> Any:
        return ask(self.request(path, body), retries)

    def tell(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """Its answer is not read: some versions of vLLM answer a command with nothing."""
        request = self.request(path, body if body is not None else {})
        request.check(request.send())


class WholeWeights:
    """Loaded from disk by the workers (`/collective_rpc`), between `/pause` and `/resume`: requests under way wait,
    and continue with the new weights."""

    start = (
        "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs --worker-extension-cls "
        "palestra.extras.vllm.worker.PalestraWorker (docs/scaling.md)"
    )

    def __init__(self, server: VllmServer, folder: Path) -> None:
        self._server = server
        self._folder = folder.resolve()
        self._method = "palestra_reload"

    def check(self) -> None:
        try:
            self._server.tell("/collective_rpc", {"method": "palestra_version"})
        except HttpError as error:
            if error.status == 404:
                raise ServiceError(
                    f"{self._server.url} takes no weights: it has no /collective_rpc. Start it with {self.start}"
                ) from None
            self._method = "reload_weights"  # vLLM's own

    def load(self, weights: Weights) -> None:
        folder, server = self._folder / f"version-{weights.version}", self._server
        folder.mkdir(parents=True, exist_ok=True)
        try:
            weights.save(folder / "model.safetensors")
            server.tell("/pause?mode=keep")
            try:
                server.tell("/collective_rpc", {"method": self._method, "kwargs": {"weights_path": str(folder)}})
                server.tell("/reset_prefix_cache?reset_running_requests=true")
            finally:
                server.tell("/resume")
        except HttpError as error:
            raise ServiceError(
                f"{server.url} did not take new weights: {error}. Restart it, as they may be half loaded. Start it "
                f"with {self.start}"
            ) from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def release(self) -> None:
        """Its weights are its own now."""


class LoraAdapters:
    """Each version of the adapter is loaded in addition to earlier ones; requests in flight keep theirs."""

    def __init__(self, server: VllmServer, folder: Path, rank: int, max_staleness: int) -> None:
        self._server = server
        self._rank = rank
        self._folders = AdapterFolders(folder, max_staleness)
        self.start = (
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --logprobs-mode processed_logprobs --enable-lora "
            f"--max-lora-rank {rank_limit(rank)} (docs/scaling.md)"
        )

    def check(self) -> None:
        """The first adapter shows what the server lacks: it is loaded before anything is sampled."""

    def load(self, weights: Weights) -> str:
        adapter, server = self._folders.write(weights), self._server
        try:
            server.tell("/v1/load_lora_adapter", {"lora_name": adapter.name, "lora_path": str(adapter.folder)})
        except HttpError as error:
            raise ServiceError(
                f"{server.url} did not load the adapter: {error}. {remedy(error.reason, self._rank)}. Start it with "
                f"{self.start}"
            ) from None
        self._folders.delete(self._unload)
        return adapter.name

    def release(self) -> None:
        self._folders.delete(self._unload, keep=0)

    def _unload(self, adapter: Adapter) -> bool:
        """Whether the server is there; if not, each further request would wait for it."""
        try:
            self._server.tell("/v1/unload_lora_adapter", {"lora_name": adapter.name})
        except HttpError as error:
            log.debug("%s was not unloaded: %s", adapter.name, error)
            return error.status is not None
        return True


def remedy(reason: str, rank: int) -> str:
    """The remedy where vLLM does not load an adapter, by its message.

    >>> remedy("LoRA rank 20 is greater than max_lora_rank 16.", 20)
    'Its --max-lora-rank must be at least lora.r = 20'
    """
    unreadable = "rollout.weights_folder must be a folder that the server can read, under the same path"
    remedies = {
        "No adapter found": unreadable,
        "Permission denied": unreadable,
        "LoRA is not enabled": "It was started without --enable-lora",
        "max_lora_rank": f"Its --max-lora-rank must be at least lora.r = {rank}",
        "target modules": "Name modules that it supports as lora.target_modules",
        "Not Found": "It was started without VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
    }
    return next(
        (text for words, text in remedies.items() if words in reason), "It must serve the model that is trained"
    )


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
        self._sync = (
            LoraAdapters(server, weights_folder, lora_rank, max_staleness)
            if lora_rank
            else WholeWeights(server, weights_folder)
        )
        self.served_model, self._context = self._base_model()  # what requests name: the model, or its last adapter
        # The ids of the probe text, which must be the same on both sides.
        own = [int(i) for i in self._tokenizer(PROBE_TEXT, add_special_tokens=False).input_ids]
        body = {"model": self.served_model, "prompt": PROBE_TEXT, "add_special_tokens": False}
        try:
            theirs = self._server.ask("/tokenize", body)["tokens"]
        except HttpError as error:
            raise ServiceError(f"{self.url} tokenises nothing: {error}. Start it with {self._sync.start}") from None
        if theirs != own:
            raise ServiceError(
                f"{self.url} serves {self.served_model!r} with another tokenizer: a text of {len(own)} tokens here has "
                f"{len(theirs)} there, or others. Let it serve the model that is trained"
            )
        self._probe_ids = own
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
            raise StorageError(
                f"version {weights.version} could not be saved to rollout.weights_folder: {error}; free some space, or "
                "choose another folder that the server can read"
            ) from error
        self.version = weights.version
        params = SamplingParams(PROBE_TOKENS, temperature=self._temperature, seed=weights.version)
        body = self._completion(self._probe_ids, params)
        turn = read_completion(self._server.ask("/v1/completions", body), self.version)
        remedy = f"Let it serve the model that is trained: {self._sync.start}"
        check_agreement(turn, self._probe_ids, weights, self._temperature, f"vLLM at {self.url}", remedy)

    def release(self) -> None:
        self._sync.release()

    def sleep(self, path: str = "/sleep?level=1") -> None:
        """Free the KV cache's memory; the weights are offloaded to the host until `wake`."""
        try:
            self._server.tell(path)
        except HttpError as error:
            raise ServiceError(
                f"{error}. model.sleep_mode needs a GPU and a vLLM that was started with --enable-sleep-mode; or set "
                "it to false"
            ) from None

    def wake(self) -> None:
        self.sleep("/wake_up")

    def _base_model(self) -> tuple[str, int]:
        """Its name at the server, and how many tokens it takes."""
        try:
            answer = self._server.ask("/v1/models", None, Retries(busy_s=_START_S, unreachable_s=_START_S))
            [model, *_] = answer["data"]  # adapters come after it
            return str(model["id"]), int(model["max_model_len"])
        except HttpError as error:
            raise ServiceError(f"no vLLM answers at vllm.url: {error}. Start it with {self._sync.start}") from None
        except (KeyError, TypeError, ValueError):
            raise ServiceError(
                f"{self.url}/v1/models is not that of a vLLM server; give its address as vllm.url"
            ) from None

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
