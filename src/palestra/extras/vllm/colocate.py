"""vLLM in this process as a Policy: its engine steps between the turns of the event loop, as our own does."""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

from palestra.core.errors import MissingPackageError, RolloutError, ServiceError
from palestra.core.machine import phases
from palestra.core.types import SamplingParams, Turn
from palestra.core.weights import Weights
from palestra.extras.vllm.common import AdapterFolders, VllmPolicy, rank_limit, sampling_fields, turn_of

WORKER = "palestra.extras.vllm.worker.PalestraWorker"


class VllmColocatePolicy(VllmPolicy):
    """Concurrent `sample` calls share the steps of one engine. It has weights of its own, updated from memory; with
    `lora_rank` its weights stay, and it is given adapters of that rank."""

    _who = "vLLM in this process"
    _remedy = "Use vllm.mode = server, or our own engine (vllm.mode = off)"

    def __init__(
        self, model: str, tokenizer: Any, temperature: float, lora_rank: int = 0, max_staleness: int = 0, **options: Any
    ) -> None:
        """`model` is a folder or a hub id; `options` are those of vLLM's `LLM`."""
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process, too
        try:
            from vllm import LLM
        except ImportError as error:
            raise MissingPackageError(
                f"vllm.mode = colocate needs vLLM in this environment ({error}); pip install 'palestra[vllm]', or use "
                "vllm.mode = server"
            ) from None
        if lora_rank:
            slots = 2 if max_staleness else 1  # turns under way keep their adapter, and others have the next one
            options |= {"enable_lora": True, "max_lora_rank": rank_limit(lora_rank), "max_loras": slots}
        try:
            self._llm = LLM(
                model,
                skip_tokenizer_init=False,
                logprobs_mode="processed_logprobs",
                worker_extension_cls=WORKER,
                **options,
            )
        except (ValueError, RuntimeError) as error:
            raise ServiceError(
                f"vLLM did not start with {model!r}: {error}. Lower vllm.max_model_len, or raise or lower "
                "vllm.gpu_memory_utilization if it is about memory"
            ) from error
        super().__init__(tokenizer, temperature)
        self._engine: Any = self._llm.llm_engine
        self._context = int(self._llm.model_config.max_model_len)
        self._folders = AdapterFolders(Path(tempfile.gettempdir()), max_staleness) if lora_rank else None
        self._adapter: Any = None  # vLLM's LoRARequest of the last version
        self._numbers = itertools.count()
        self._waiters: dict[str, asyncio.Future[Any]] = {}
        self._driver: asyncio.Task[None] | None = None

    async def _sample(self, ids: list[int], params: SamplingParams) -> Turn:
        version, request = self.version, f"palestra-{next(self._numbers)}"
        loop = asyncio.get_running_loop()
        try:
            prompt = {"prompt_token_ids": list(ids)}
            self._engine.add_request(request, prompt, vllm_params(params), lora_request=self._adapter)
        except ValueError as error:
            raise RolloutError(f"vLLM refuses the request: {error}") from None
        waiter = self._waiters[request] = loop.create_future()
        if self._driver is None or self._driver.done() or self._driver.get_loop() is not loop:
            self._driver = loop.create_task(self._drive())
        try:
            return read_output(await waiter, version)
        finally:
            if self._waiters.pop(request, None) is not None and not waiter.done():
                self._engine.abort_request([request])

    async def _drive(self) -> None:
        """Step while callers wait; a failed step fails every turn in flight."""
        await asyncio.sleep(0)
        while self._waiters:
            try:
                with phases("decode"):
                    outputs = self._engine.step()
            except Exception as error:
                for waiter in self._waiters.values():
                    if not waiter.done():
                        waiter.set_exception(error)
                return
            for output in outputs:
                asked = self._waiters.get(output.request_id)
                if output.finished and asked is not None and not asked.done():
                    asked.set_result(output)
            await asyncio.sleep(0)

    def _load(self, weights: Weights) -> None:
        if self._folders is None:  # copied into vLLM's own; turns under way are computed again from their first token
            self._llm.collective_rpc("palestra_load", args=(list(weights.tensors().items()),))
            self._llm.reset_prefix_cache(reset_running_requests=True)
        else:
            # In addition to the earlier ones; turns under way continue with theirs.
            from vllm.lora.request import LoRARequest

            adapter = self._folders.write(weights)
            self._adapter = LoRARequest(adapter.name, adapter.number, str(adapter.folder))
            try:
                self._engine.add_lora(self._adapter)
            except Exception as error:
                raise ServiceError(
                    f"vLLM did not load the adapter: {error}. Name modules that it supports as lora.target_modules, or "
                    "use our own engine (vllm.mode = off)"
                ) from error
            self._folders.delete()

    def _probe(self, params: SamplingParams) -> Turn | None:
        if self._waiters:  # `generate` would take their outputs; the next update checks, and training measures
            return None
        prompt = {"prompt_token_ids": self._probe_ids}
        [output] = self._llm.generate([prompt], vllm_params(params), use_tqdm=False, lora_request=self._adapter)
        return read_output(output, self.version)

    def sleep(self, name: str = "sleep") -> None:
        try:
            getattr(self._llm, name)()
        except Exception as error:
            raise ServiceError(
                f"vLLM cannot {name.replace('_', ' ')} here: {error}. model.sleep_mode needs a GPU; set it to false"
            ) from error

    def wake(self) -> None:
        self.sleep("wake_up")


def vllm_params(params: SamplingParams) -> Any:
    from vllm import SamplingParams as VllmParams

    fields = sampling_fields(params)
    return VllmParams(**fields if fields["stop"] else fields | {"detokenize": False})


def read_output(output: Any, version: int) -> Turn:
    """Convert the one completion of vLLM's RequestOutput to a turn."""
    [completion] = output.outputs
    ids = [int(i) for i in completion.token_ids]
    logprobs = [row[token].logprob for row, token in zip(completion.logprobs or (), ids, strict=False)]
    return turn_of(ids, logprobs, version, completion.finish_reason)
