"""A running vLLM as a Policy: token ids in and out over HTTP, weights or adapters by files that both can read."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from palestra.core.errors import RolloutError, ServiceError, StorageError
from palestra.core.http import ConcurrencyLimit, HttpError, Request, Retries, ask, ask_async
from palestra.core.types import SamplingParams, Turn
from palestra.core.weights import Weights
from palestra.extras.vllm.common import (
    PROBE_TEXT,
    Adapter,
    AdapterFolders,
    VllmPolicy,
    rank_limit,
    sampling_fields,
    turn_of,
)

log = logging.getLogger("palestra")
_MAX_REPLY_BYTES = 2**28
_ONCE = Retries(attempts=1)
_START_S = 10.0  # how long a server may be away before a run begins
_START_WHOLE = (
    "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs --worker-extension-cls "
    "palestra.extras.vllm.worker.PalestraWorker (docs/scaling.md)"
)
_START_LORA = (
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --logprobs-mode processed_logprobs --enable-lora "
    "--max-lora-rank {rank} (docs/scaling.md)"
)


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
    return next((text for words, text in remedies.items() if words in reason), "It must serve the trained model")


class VllmServerPolicy(VllmPolicy):
    """Samples by `/v1/completions`. Its prefix cache makes the turns of a conversation cheap.

    With `lora_rank` it is given adapters of that rank, else whole weights.
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
        super().__init__(tokenizer, temperature)
        self.url = url.rstrip("/").removesuffix("/v1")
        self._token, self._timeout_s = token, timeout_s
        self._limit = ConcurrencyLimit(max_concurrent)
        self._folder, self._rank = weights_folder.resolve(), lora_rank
        self._folders = AdapterFolders(weights_folder, max_staleness) if lora_rank else None
        self._start = _START_LORA.format(rank=rank_limit(lora_rank)) if lora_rank else _START_WHOLE
        self._who, self._remedy = f"vLLM at {self.url}", f"Let it serve the model that is trained: {self._start}"
        self.served_model, self._context = self._base_model()  # what requests name: the model, or its last adapter
        # The ids of the probe text must be the same on both sides.
        body = {"model": self.served_model, "prompt": PROBE_TEXT, "add_special_tokens": False}
        try:
            theirs = self._ask("/tokenize", body)["tokens"]
        except HttpError as error:
            raise ServiceError(f"{self.url} tokenises nothing: {error}. Start it with {self._start}") from None
        if theirs != self._probe_ids:
            raise ServiceError(
                f"{self.url} serves {self.served_model!r} with another tokenizer: a text of {len(self._probe_ids)} "
                f"tokens here has {len(theirs)} there, or others. Let it serve the model that is trained"
            )
        # The first adapter shows what the server lacks: it is loaded before anything is sampled.
        self._reload_method = "" if lora_rank else self._find_reload_method()

    def _request(self, path: str, body: Mapping[str, Any] | None) -> Request:
        url = f"{self.url}{path}"
        return Request(url, body, token=self._token, timeout_s=self._timeout_s, max_bytes=_MAX_REPLY_BYTES)

    def _ask(self, path: str, body: Mapping[str, Any] | None, retries: Retries = _ONCE) -> Any:
        return ask(self._request(path, body), retries)

    def _tell(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """Its answer is not read: some versions of vLLM answer a command with nothing."""
        request = self._request(path, body if body is not None else {})
        request.check(request.send())

    def _find_reload_method(self) -> str:
        """The worker's method that loads whole weights: ours, or vLLM's own."""
        try:
            self._tell("/collective_rpc", {"method": "palestra_version"})
        except HttpError as error:
            if error.status == 404:
                raise ServiceError(
                    f"{self.url} takes no weights: it has no /collective_rpc. Start it with {self._start}"
                ) from None
            return "reload_weights"
        return "palestra_reload"

    async def _sample(self, ids: list[int], params: SamplingParams) -> Turn:
        version = self.version
        request = self._request("/v1/completions", self._completion(ids, params))
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

    def _load(self, weights: Weights) -> None:
        try:
            if self._folders is None:
                self._load_whole(weights)
            else:
                self.served_model = self._load_adapter(weights, self._folders)
        except OSError as error:
            raise StorageError(
                f"version {weights.version} could not be saved to rollout.weights_folder: {error}; free some space, or "
                "choose another folder that the server can read"
            ) from error

    def _load_whole(self, weights: Weights) -> None:
        """Loaded from disk by the workers (`/collective_rpc`), between `/pause` and `/resume`: requests under way wait,
        and continue with the new weights."""
        folder = self._folder / f"version-{weights.version}"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            weights.save(folder / "model.safetensors")
            self._tell("/pause?mode=keep")
            try:
                kwargs = {"weights_path": str(folder)}
                self._tell("/collective_rpc", {"method": self._reload_method, "kwargs": kwargs})
                self._tell("/reset_prefix_cache?reset_running_requests=true")
            finally:
                self._tell("/resume")
        except HttpError as error:
            raise ServiceError(
                f"{self.url} did not take new weights: {error}. Restart it, as they may be half loaded. Start it "
                f"with {self._start}"
            ) from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _load_adapter(self, weights: Weights, folders: AdapterFolders) -> str:
        """Loaded in addition to the adapters of earlier versions; requests in flight keep theirs."""
        adapter = folders.write(weights)
        try:
            self._tell("/v1/load_lora_adapter", {"lora_name": adapter.name, "lora_path": str(adapter.folder)})
        except HttpError as error:
            raise ServiceError(
                f"{self.url} did not load the adapter: {error}. {remedy(error.reason, self._rank)}. Start it with "
                f"{self._start}"
            ) from None
        folders.delete(self._unload)
        return adapter.name

    def _unload(self, adapter: Adapter) -> bool:
        """Whether the server is there; if not, each further request would wait for it."""
        try:
            self._tell("/v1/unload_lora_adapter", {"lora_name": adapter.name})
        except HttpError as error:
            log.debug("%s was not unloaded: %s", adapter.name, error)
            return error.status is not None
        return True

    def release(self) -> None:
        if self._folders is not None:
            self._folders.delete(self._unload, keep=0)

    def _probe(self, params: SamplingParams) -> Turn:
        return read_completion(self._ask("/v1/completions", self._completion(self._probe_ids, params)), self.version)

    def sleep(self, path: str = "/sleep?level=1") -> None:
        """Free the KV cache's memory; the weights are offloaded to the host until `wake`."""
        try:
            self._tell(path)
        except HttpError as error:
            raise ServiceError(f"{error}. model.sleep_mode needs a GPU and vLLM's --enable-sleep-mode") from None

    def wake(self) -> None:
        self.sleep("/wake_up")

    def _base_model(self) -> tuple[str, int]:
        """Its name at the server, and how many tokens it takes."""
        try:
            answer = self._ask("/v1/models", None, Retries(busy_s=_START_S, unreachable_s=_START_S))
            [model, *_] = answer["data"]  # adapters come after it
            return str(model["id"]), int(model["max_model_len"])
        except HttpError as error:
            raise ServiceError(f"no vLLM answers at vllm.url: {error}. Start it with {self._start}") from None
        except (KeyError, TypeError, ValueError):
            raise ServiceError(f"{self.url}/v1/models is not vLLM's; set vllm.url to a vLLM server") from None

    def _completion(self, ids: Sequence[int], params: SamplingParams) -> dict[str, Any]:
        return sampling_fields(params) | {"model": self.served_model, "prompt": ids, "return_token_ids": True}


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
