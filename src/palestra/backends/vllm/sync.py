"""How the weights of a version get into a running vLLM: whole ones, or a LoRA adapter."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from palestra.backends.vllm.adapters import Adapter, AdapterFolders, rank_limit
from palestra.core.errors import PalestraError
from palestra.core.http import HttpError, Request, Retries, ask
from palestra.core.weights import Weights

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


class WeightSync(Protocol):
    start: str  # how the server must have been started

    def check(self) -> None:
        """PalestraError where the server cannot be given weights, as far as it can be seen without any."""
        ...

    def load(self, weights: Weights) -> str | None:
        """Give them to the server; returns the name by which requests get them, None for that of its model."""
        ...

    def release(self) -> None:
        """Take away what a run leaves at the server."""
        ...


class WholeWeights:
    """Loaded from disk by the workers (`/collective_rpc`), between `/pause` and `/resume`: requests under way wait,
    and go on with the new weights."""

    start = (
        "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs --worker-extension-cls "
        "palestra.backends.vllm.worker.PalestraWorker (docs/scaling.md)"
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
                raise PalestraError(
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
            raise PalestraError(
                f"{server.url} did not take new weights: {error}. Restart it, as they may be half loaded. Start it "
                f"with {self.start}"
            ) from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def release(self) -> None:
        """Its weights are its own now."""


class LoraAdapters:
    """Each version of the adapter is loaded beside the earlier ones; requests under way go on with theirs."""

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
            raise PalestraError(
                f"{server.url} did not load the adapter: {error}. {remedy(error.reason, self._rank)}. Start it with "
                f"{self.start}"
            ) from None
        self._unload(self._folders.take_outdated())
        return adapter.name

    def release(self) -> None:
        self._unload(self._folders.take_all())

    def _unload(self, adapters: Iterable[Adapter]) -> None:
        for adapter in adapters:
            try:
                self._server.tell("/v1/unload_lora_adapter", {"lora_name": adapter.name})
            except HttpError as error:
                log.debug("%s was not unloaded: %s", adapter.name, error)
                if error.status is None:  # it is gone, and each request would wait for it
                    return
            adapter.delete()


def remedy(reason: str, rank: int) -> str:
    """What to change where vLLM does not load an adapter, by what it says.

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
