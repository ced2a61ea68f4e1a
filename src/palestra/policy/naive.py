"""Naive batched sampling: left-padded, in lock step, any causal language model.

Slow and simple: it needs nothing of the model but a forward with a cache. Models that the engine cannot run fall
back to it, and the engine is measured against it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from palestra.core.errors import InputError, SettingError, StateError
from palestra.core.types import Finish, Matching, SamplingParams, Turn
from palestra.core.weights import Weights
from palestra.engine.sampler import SamplingRow, StopStrings, check_params, sample
from palestra.models.chat.grammars import grammar_compiler
from palestra.policy.base import Policy
from palestra.policy.local import load_weights


@dataclass(eq=False, slots=True)
class NaiveSession:
    token_ids: list[int]
    closed: bool = False


@dataclass(eq=False, slots=True)
class _Request:
    session: NaiveSession
    params: SamplingParams
    done: asyncio.Future[Turn]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Finish | None = None
    matching: Matching | None = None

    @property
    def row(self) -> SamplingRow:
        tokens = self.session.token_ids + self.ids
        return SamplingRow(self.params, len(tokens), tokens, self.matching if self.finish is None else None)


class NaivePolicy(Policy[NaiveSession]):
    """A Policy that computes every turn from its first token on."""

    version: int = 0

    def __init__(self, model: Any, tokenizer: Any = None, max_batch: int = 256) -> None:
        self._model = model
        self._max_batch = max_batch
        self._weights_lock = threading.Lock()
        self._stops = StopStrings(tokenizer)
        self._compile_grammar = grammar_compiler(tokenizer)
        self._waiting: list[_Request] = []
        self._worker: asyncio.Task[None] | None = None

    def update(self, weights: Weights) -> None:
        with self._weights_lock:  # batches run in a thread
            load_weights(self._model, weights)
            self.version = weights.version

    def open(self, prompt_ids: Sequence[int]) -> NaiveSession:
        if not len(prompt_ids):
            raise InputError("the prompt is empty; a session needs at least one token to continue from")
        return NaiveSession([int(i) for i in prompt_ids])

    def fork(self, session: NaiveSession, n: int) -> list[NaiveSession]:
        if n < 1:
            raise SettingError(f"fork into n={n} sessions; expected 1 or more")
        _check_open(session)
        session.closed = True
        return [NaiveSession(list(session.token_ids)) for _ in range(n)]

    def append(self, session: NaiveSession, token_ids: Sequence[int]) -> None:
        _check_open(session)
        session.token_ids += [int(i) for i in token_ids]

    def close(self, session: NaiveSession) -> None:
        session.closed = True

    async def sample(self, session: NaiveSession, params: SamplingParams) -> Turn:
        _check_open(session)
        check_params(params, self._stops.usable)
        request = _Request(session, params, asyncio.get_running_loop().create_future())
        request.matching = self._compile_grammar(params.grammar).start() if params.grammar is not None else None
        self._waiting.append(request)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        try:
            sampled = await request.done
        finally:
            if request in self._waiting:
                self._waiting.remove(request)
        session.token_ids += sampled.token_ids.tolist()
        return sampled

    async def _work(self) -> None:
        while self._waiting:
            for _ in range(3):  # let callers that are ready now join the batch
                await asyncio.sleep(0)
            batch, self._waiting = self._waiting[: self._max_batch], self._waiting[self._max_batch :]
            failure: Exception | None = None
            try:
                await asyncio.to_thread(self._run, batch)
            except Exception as error:
                failure = error
            for r in batch:
                if r.done.done():  # cancelled
                    continue
                if failure is not None:
                    r.done.set_exception(failure)
                else:
                    r.done.set_result(Turn("model", r.ids, r.logprobs, r.versions, r.finish))  # type: ignore[arg-type]

    @torch.inference_mode()
    def _run(self, batch: list[_Request]) -> None:
        """Sample the turns of a batch, a token each at a time; from the first token on after an update of weights."""
        training = self._model.training
        self._model.eval()
        device = next(self._model.parameters()).device
        cache: Any = None
        version: int | None = None  # of the weights that the cache is of
        next_ids = mask = torch.empty(0)  # [B, T] and [B, cached + T]
        try:
            while not all(request.finish for request in batch):
                with self._weights_lock:
                    if version != self.version:  # padded on the left so that all rows end together
                        rows = [request.session.token_ids + request.ids for request in batch]
                        width = max(map(len, rows))
                        next_ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
                        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=device)
                        cache, version = None, self.version
                    out = self._model(
                        next_ids,
                        attention_mask=mask,
                        position_ids=(mask.cumsum(-1) - 1).clamp(min=0)[:, -next_ids.shape[1] :],
                        past_key_values=cache,
                        use_cache=True,
                        logits_to_keep=1,
                    )
                    tokens, logprobs = sample(out.logits[:, -1].float(), [request.row for request in batch])
                    for request, token, logprob in zip(batch, tokens.tolist(), logprobs.tolist(), strict=True):
                        if request.finish is None:
                            self._add(request, token, logprob)
                    cache, next_ids = out.past_key_values, tokens[:, None]
                    mask = torch.cat([mask, mask.new_ones(len(batch), 1)], dim=-1)
        finally:
            self._model.train(training)

    def _add(self, request: _Request, token: int, logprob: float) -> None:
        request.ids.append(token)
        request.logprobs.append(logprob)
        request.versions.append(self.version)
        if request.matching is not None:
            request.matching.accept(token)
        params = request.params
        if token in params.stop_token_ids or (params.stop and self._stops.found(request.ids, params.stop)):
            request.finish = "stop"
        elif len(request.ids) >= params.max_new_tokens:
            request.finish = "length"


def _check_open(session: NaiveSession) -> None:
    if session.closed:
        raise StateError("the session is closed (fork closes the session that it copies); open a new one")
