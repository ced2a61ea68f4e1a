"""The policy that samples from the module being trained, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from palestra.core.errors import PalestraError, SettingError, text_of
from palestra.core.types import Grammar, SamplingParams, Turn
from palestra.core.weights import Weights
from palestra.engine.attention import plain_forward
from palestra.engine.engine import Engine, Step
from palestra.engine.session import Job, Session
from palestra.models.chat.grammars import grammar_compiler
from palestra.policy.base import Policy, TokenLogprobs

_QUICK_S = 0.05  # tools that take less are waited for
_PATIENCE_S = 1.0
_RESTORED_S = 0.001  # of the patience, by each quick call
_BEGIN_S = 60.0  # for which a first step waits for turns of other processes, and how often it looks
_POLL_S = 0.0005


class ToolBarrier:
    """Lets a step wait for sessions between two turns: their caller runs a tool, or is about to close them.

    So a quick tool's answer joins the very next step whatever the threads' timing: the same seed gives the same
    batches, hence the same numbers to the last bit. Waits that take long use up a second of patience, and quick calls
    restore it bit by bit: a busy moment changes nothing, and slow tools soon delay no step. `waits_for_all` never ends.
    """

    def __init__(self, waits_for_all: bool = False) -> None:
        self._patience_s = math.inf if waits_for_all else _PATIENCE_S
        self._left_at: dict[Session, float] = {}
        self._awaited: set[Session] = set()
        self._all_back = asyncio.Event()

    def turn_ended(self, session: Session) -> None:
        self._left_at[session] = time.perf_counter()
        self._awaited.add(session)

    def came_back(self, session: Session) -> None:
        """Its next turn begins, or it is closed."""
        away_s = time.perf_counter() - self._left_at.get(session, -math.inf)
        if away_s < _QUICK_S and self._patience_s < _PATIENCE_S:
            self._patience_s += _RESTORED_S
        self.forget(session)

    def forget(self, session: Session) -> None:
        """Stop waiting for this session."""
        self._left_at.pop(session, None)
        self._awaited.discard(session)
        if not self._awaited:
            self._all_back.set()

    async def wait(self) -> None:
        """Wait until all sessions are back or the patience ends; do not wait again for those still missing."""
        if self._awaited and self._patience_s >= _QUICK_S:
            self._all_back = asyncio.Event()  # belongs to the loop that waits
            began = time.perf_counter()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_back.wait(), self._patience_s)
            waited_s = time.perf_counter() - began
            if waited_s > _QUICK_S:
                self._patience_s = max(0.0, self._patience_s - waited_s)
        self._awaited.clear()


# Rounds of the event loop between two steps. A new request needs a few of them until its first turn is submitted, and a
# step on a GPU decodes many tokens, so a request that misses one waits long.
_YIELDS = 4
# On a CPU a step holds up everything else, and what comes during it begins a step later. So requests that come one upon
# the other, as those of the agents of a step do, are gathered first; the work on them is to be done anyway. Counted in
# rounds, not by a clock: who shares a step with whom must be the same in every run of a seed.
_ROUNDS = 32


class LocalPolicy(Policy[Session]):
    """The engine behind the Policy seam. Concurrent `sample` calls share its steps.

    The engine runs on the event loop's own thread, one step at a time, and yields in between: tools and other
    coroutines go on while a batch is sampled, and no lock is needed. `ToolBarrier` decides when steps wait for tools.

    On a GPU the next step begins before the turns that ended with the last one are delivered: their callers read them
    and run their tools while it computes, and join the step after it.
    """

    can_branch = True
    # On a GPU a step ends many turns at once. They are delivered in portions with a step in between: the first are
    # being sampled again while the tools of the last are called.
    turns_at_once = 128

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        waits_for_all_tools: bool = False,
        **engine_options: Any,
    ) -> None:
        # clients of a server may send any text
        compile_grammar = grammar_compiler(tokenizer)

        def compile_text(text: str) -> Grammar:
            try:
                return compile_grammar(text)
            except PalestraError:
                raise
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise SettingError(f"the grammar cannot be read ({text_of(error)}); leave it out") from error

        self.engine = Engine(model, tokenizer, compile_grammar=compile_text, **engine_options)
        self._waiters: dict[Job, asyncio.Future[Turn]] = {}
        self._driver: asyncio.Task[None] | None = None
        self._calls = 0  # of `sample`
        self._expected = 0  # turns that other processes are about to begin
        self._step: Step | None = None  # in progress on the device
        self._ended: deque[Job] = deque()  # turns that have not been handed to their callers yet
        self.tool_barrier = ToolBarrier(waits_for_all_tools)

    @property
    def version(self) -> int:
        return self.engine.version

    def open(self, prompt_ids: Sequence[int]) -> Session:
        return self.engine.open(prompt_ids)

    def fork(self, session: Session, n: int) -> list[Session]:
        return self.engine.fork(session, n)

    def branch(self, session: Session, length: int) -> Session:
        return self.engine.branch(session, length)

    def append(self, session: Session, token_ids: Sequence[int]) -> None:
        self.engine.append(session, token_ids)

    def close(self, session: Session) -> None:
        if session.job is not None:
            self._collect()
        job = session.job
        self.tool_barrier.came_back(session)
        self.engine.close(session)
        if job is not None:
            self._deliver(job)

    def skip_tool_barrier(self, session: Session) -> None:
        self.tool_barrier.forget(session)

    def expect(self, turns: int) -> None:
        """Announce turns of other processes, for which the first step waits; a negative number takes some back."""
        self._expected = max(0, self._expected + turns)

    def update(self, weights: Weights) -> None:
        """Copy the tensors, unless the engine runs the module that holds them; cached KV is stale in both cases."""
        self._collect()
        load_weights(self.engine.model, weights)
        self.engine.weights_changed(weights.version)

    def sleep(self) -> None:
        self._collect()
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()

    async def sample(self, session: Session, params: SamplingParams) -> Turn:
        return await self.begin(session, params)

    def begin(self, session: Session, params: SamplingParams) -> asyncio.Future[Turn]:
        self.tool_barrier.came_back(session)
        self._calls += 1
        self._expected = max(0, self._expected - 1)
        job = self.engine.submit(session, params)
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Turn] = loop.create_future()
        waiter.add_done_callback(partial(self._settle, job))
        if job.finish is not None:
            waiter.set_result(job.result())
            return waiter
        self._waiters[job] = waiter
        if self._driver is None or self._driver.done() or self._driver.get_loop() is not loop:
            self._driver = loop.create_task(self._drive())
        return waiter

    def _settle(self, job: Job, turn: asyncio.Future[Turn]) -> None:
        """Forget a turn that was begun; cancel it if it has not ended."""
        self._waiters.pop(job, None)
        if job.finish is None:
            self._collect()
            self.engine.cancel(job)

    async def _drive(self) -> None:
        """Step while callers wait. A failed step fails every turn in progress, not the loop."""
        self._collect()  # a driver before this one may have been cancelled
        await self._drain_submissions(_ROUNDS)  # callers that start together are batched from the first step
        until = time.perf_counter() + _BEGIN_S
        while self._expected and time.perf_counter() < until:
            await asyncio.sleep(_POLL_S)
        self._expected = 0
        while self._waiters:
            try:
                self._step = self.engine.launch()
                if self._step is None and not self._ended:
                    # the callers of turns that have ended may give the missing pages back
                    await self._others()
                    self._step = self.engine.launch()
                    if self._step is None:
                        self._ended.extend(self.engine.truncate_when_cache_full())
                overlaps, calls = self.engine.runner.overlaps, self._calls
                if not overlaps:
                    self._collect()
                for _ in range(min(self.turns_at_once if overlaps else len(self._ended), len(self._ended))):
                    self._deliver(self._ended.popleft())
                await self._others()
                if overlaps:
                    self._collect(until_one_ends=not self._ended and calls == self._calls)
            except Exception as error:
                self._step = None
                self._ended.clear()
                for waiter in list(self._waiters.values()):
                    if not waiter.done():
                        waiter.set_exception(error)
                return

    async def _others(self) -> None:
        """Yield to the callers of finished turns, and wait for those that return quickly."""
        # where nothing overlaps a step, as long as more of them come
        await self._drain_submissions(1 if self.engine.runner.overlaps else _ROUNDS)
        await self.tool_barrier.wait()

    async def _drain_submissions(self, rounds: int) -> None:
        """Let callers submit their turns, as long as more of them come."""
        for _ in range(rounds):
            calls = self._calls
            for _ in range(_YIELDS):
                await asyncio.sleep(0)
            if calls == self._calls:
                return

    def _collect(self, until_one_ends: bool = True) -> None:
        """Wait for the step in progress, if there is one."""
        step, self._step = self._step, None
        if step is not None:
            self._ended.extend(self.engine.collect(step, until_one_ends))

    def _deliver(self, job: Job) -> None:
        """Give a turn that ended to its caller."""
        waiter = self._waiters.get(job)
        if waiter is not None and not waiter.done():
            self.tool_barrier.turn_ended(job.session)
            waiter.set_result(job.result())


@torch.no_grad()
def load_weights(model: Any, weights: Weights) -> None:
    """Copy the tensors by name; nothing to do where the learner trains this module itself."""
    if weights.module is model:
        return
    own = dict(model.named_parameters())
    tensors = weights.tensors()
    for name, tensor in tensors.items():
        if name not in own or own[name].shape != tensor.shape:
            has = f"has the shape {list(own[name].shape)}" if name in own else "is missing"
            raise SettingError(
                f"version {weights.version} brings {name} of shape {list(tensor.shape)}, which {has} here; "
                "learner and policy must load the same model, with the same lora settings"
            )
    for name, tensor in tensors.items():
        own[name].copy_(tensor)


Model = TypeVar("Model", bound=nn.Module)


def sampling_copy(model: Model) -> Model:
    """The model with its frozen parameters shared and its trainable ones copied.

    A policy on the copy samples the current weights until `policy.update(learner.weights(…))` brings newer ones.
    With LoRA only the adapters are held twice.

    >>> policy = LocalPolicy(sampling_copy(model))    # doctest: +SKIP
    """
    frozen = {id(parameter): parameter for parameter in model.parameters() if not parameter.requires_grad}
    return copy.deepcopy(model, frozen).eval().requires_grad_(False)


_CHUNK = 512  # tokens whose logits are held at once


def token_logprobs(
    model: Any, token_ids: Sequence[int], start: int, *, top: int = 0, temperature: float = 1.0
) -> Iterator[TokenLogprobs]:
    """The tokens from place `start` (1 or more) on, given all before them; a piece after each chunk of work."""
    ids = torch.tensor([list(token_ids)], device=next(model.parameters()).device)
    cache = None
    for begin in range(0, ids.shape[1] - 1, _CHUNK):
        end = min(begin + _CHUNK, ids.shape[1] - 1)
        scored = end - max(begin, start - 1)  # the last of the chunk predict them
        options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": max(scored, 1)}
        out = plain_forward(model, ids[:, begin:end], **options)
        cache = out.past_key_values
        if scored > 0:
            logprobs = (out.logits[0] / temperature).float().log_softmax(-1)  # [T, V]
            values, best = logprobs.topk(min(top, logprobs.shape[1]))
            pairs = [list(zip(i, v, strict=True)) for i, v in zip(best.tolist(), values.tolist(), strict=True)]
            tokens = ids[0, end + 1 - scored : end + 1, None]
            yield TokenLogprobs(logprobs.gather(1, tokens)[:, 0].tolist(), pairs)
