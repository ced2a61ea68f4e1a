"""Samples one model's versions in a thread of its own, next to the thread that trains it.

All requests of one version share the engine's batches; one for another version waits until those before it have ended.
Requests come one by one over HTTP, many in a burst. An engine that begins with the first holds up the others, as the
server's thread then waits for the interpreter. So a burst is gathered until a pause, and then begun as one batch, in
which a prompt that several of them have is computed once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from palestra.core.errors import InputError
from palestra.core.types import Array, SamplingParams, Turn
from palestra.core.weights import Weights
from palestra.engine.attention import plain_forward
from palestra.extras.tinker.server.base_model import AdapterSpec, BaseModel
from palestra.extras.tinker.server.futures import Result
from palestra.extras.tinker.server.messages import EMPTY_LOGPROB, Tensor, TopK, write_sample
from palestra.extras.tinker.server.requests import Sample
from palestra.policy.build import build_policy
from palestra.policy.local import token_logprobs

PAUSE_S = 0.01  # without a new request: the burst is over
LONGEST_BURST_S = 0.2


# The tensors of one version, unaffected by further training, by the names of the module's weights; none of them for the
# base model itself. Versions are told apart by this object.
ReadWeights = Callable[[], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class SampleRequest:
    weights: ReadWeights
    prompt: list[int]
    turns: Sequence[SamplingParams]  # one for each sample
    body: Sample
    targets: Tensor | None = None  # token ids [T - 1, K] to score at prompt positions 1 and later; -1: none


class Sampler:
    """A module, an engine and the thread that drives it."""

    def __init__(self, base: BaseModel, spec: AdapterSpec | None, kv_memory_gib: float | None = None) -> None:
        self._base, self._spec, self._kv_memory_gib = base, spec, kv_memory_gib
        self._unanswered: set[Future[Result]] = set()
        self._loaded: ReadWeights | None = None
        self._loads = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._queue: asyncio.Queue[tuple[SampleRequest | None, Future[Result]]] = asyncio.Queue()
        self._thread = threading.Thread(target=self._run, name="tinker-sampler", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> int:
        """Requests that have not been answered."""
        return len(self._unanswered)

    def submit(self, request: SampleRequest, answer: Future[Result]) -> None:
        """Answer when its turn has come; from any thread."""
        self._unanswered.add(answer)
        answer.add_done_callback(self._unanswered.discard)
        self._loop.call_soon_threadsafe(self._queue.put_nowait, (request, answer))

    def close(self, wait_s: float = 0.0) -> None:
        """End the thread when what it works on is done; wait for that at most so long."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, (None, Future()))
        self._thread.join(wait_s)

    def _run(self) -> None:
        self._base.use_stream()
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        broken: Exception | None = None
        try:
            self._module: Any = self._base.module(self._spec).eval().requires_grad_(False)
            with self._base.building:  # an engine may move the weights that all share
                self._policy = build_policy(self._module, self._base.tokenizer, "auto", self._kv_memory_gib)
        except Exception as error:
            broken = error
        while True:
            burst = await self._burst()
            siblings = Counter(_prompt_of(request) for request, _ in burst if request for _ in request.turns)
            forks: dict[Any, Iterator[Any]] = {}
            for request, answer in burst:
                if request is None or request.weights is not self._loaded:
                    await asyncio.gather(*self._tasks, return_exceptions=True)
                if request is None:
                    return
                try:
                    if broken is not None:
                        raise broken
                    if request.weights is not self._loaded:
                        self._loads += 1
                        self._policy.update(Weights(self._loads, request.weights))
                        self._loaded = request.weights
                    prompt = _prompt_of(request)
                    if prompt not in forks:
                        forks[prompt] = iter(self._policy.fork(self._policy.open(request.prompt), siblings[prompt]))
                except Exception as error:
                    answer.set_exception(error)
                    continue
                sessions = [next(forks[prompt]) for _ in request.turns]
                task = asyncio.create_task(self._work(request, sessions, answer))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _burst(self) -> list[tuple[SampleRequest | None, Future[Result]]]:
        """The next requests: the first, and all that come until a pause."""
        burst = [await self._queue.get()]
        until, waiting = time.monotonic() + LONGEST_BURST_S, -1
        while waiting != self._queue.qsize() and time.monotonic() < until:
            waiting = self._queue.qsize()
            await asyncio.sleep(PAUSE_S)
        return burst + [self._queue.get_nowait() for _ in range(self._queue.qsize())]

    async def _work(self, request: SampleRequest, sessions: Sequence[Any], answer: Future[Result]) -> None:
        try:
            turns = await asyncio.gather(*map(self._turn, sessions, request.turns))
            tops: list[TopK | None] = [None] * len(turns)
            if k := request.body.topk_sample_logprobs:
                for i, (turn, params) in enumerate(zip(turns, request.turns, strict=True)):
                    ids = [*request.prompt, *turn.token_ids.tolist()]
                    _, top = await self._score(ids, len(request.prompt), k, params.temperature or 1.0)
                    tops[i] = TopK(*(column[len(request.prompt) :] for column in top))
            answer.set_result(write_sample(turns, tops, *await self._score_prompt(request)))
        except Exception as error:
            answer.set_exception(error)

    async def _turn(self, session: Any, params: SamplingParams) -> Turn:
        """Sample one turn and close its session, since the engine waits briefly for open ones."""
        try:
            return await self._policy.sample(session, params)
        finally:
            self._policy.close(session)

    async def _score_prompt(self, request: SampleRequest) -> tuple[Array | None, TopK | None, Tensor | None]:
        """The prompt's own logprobs, the most likely tokens at its places, and the logprobs of other tokens there."""
        prompt, body, k = request.prompt, request.body, request.body.topk_prompt_logprobs
        targets = None if request.targets is None else await self._score_targets(prompt, request.targets)
        if not (body.prompt_logprobs or k):
            return None, None, targets
        start = max(1, len(prompt) - (body.prompt_logprobs_last_n or len(prompt)))
        logprobs, top = await self._score(prompt, start, k)
        return logprobs if body.prompt_logprobs else None, top if k else None, targets

    async def _score(self, ids: list[int], start: int, k: int, temperature: float = 1.0) -> tuple[Array, TopK]:
        """[T] logprobs of the tokens from `start` on, and [T, k] the most likely ones in their places."""
        logprobs, best = np.full(len(ids), np.nan, np.float32), np.zeros((len(ids), k), np.int32)
        values = np.full((len(ids), k), EMPTY_LOGPROB, np.float32)
        at = start
        for piece in token_logprobs(self._module, ids, start, top=k, temperature=temperature) if at < len(ids) else ():
            for logprob, pairs in zip(piece.logprobs, piece.top, strict=True):
                logprobs[at] = logprob
                for j, pair in enumerate(pairs):
                    best[at, j], values[at, j] = pair
                at += 1
            await asyncio.sleep(0)
        return logprobs, TopK(best, values)

    async def _score_targets(self, prompt: list[int], targets: Tensor) -> Tensor:
        if len(targets.shape) != 2 or targets.shape[0] != len(prompt) - 1:
            raise InputError(f"target_prompt_logprobs has shape {list(targets.shape)}; expected [{len(prompt) - 1}, K]")
        ids = torch.tensor([prompt], device=self._base.device)
        logprobs = plain_forward(self._module, ids[:, :-1], use_cache=False).logits[0].float().log_softmax(-1)
        rows = torch.from_numpy(targets.rows).to(ids.device)
        target_ids = torch.from_numpy(targets.values.astype(np.int64)).to(ids.device)
        values = logprobs[rows, target_ids.clamp(min=0)].where(target_ids >= 0, 0.0)
        return Tensor(values.cpu().numpy(), targets.shape, targets.cells)


def _prompt_of(request: SampleRequest) -> tuple[int, tuple[int, ...]]:
    """The same for requests whose prompt can be computed once: that of the same version."""
    return id(request.weights), tuple(request.prompt)
