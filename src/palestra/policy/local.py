"""The policy that samples from the module being trained, in this process."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

from torch import nn

from palestra.chat.callgrammar import grammar_compiler
from palestra.core.types import SamplingParams, Turn
from palestra.core.weights import Weights
from palestra.engine.engine import Engine
from palestra.engine.session import Job, Session
from palestra.policy.load_weights import load_weights


class LocalPolicy:
    """The engine behind the Policy seam. Concurrent `sample` calls share its steps.

    The engine runs on the event loop's own thread, one step at a time, and yields in between: tools and
    other coroutines go on while a batch is sampled, and no lock is needed.
    """

    def __init__(self, model: nn.Module, tokenizer: Any = None, **engine_options: Any) -> None:
        self.engine = Engine(model, tokenizer, compile_grammar=grammar_compiler(tokenizer), **engine_options)
        self._waiters: dict[Job, asyncio.Future[Turn]] = {}
        self._driver: asyncio.Task[None] | None = None
        self._pauses = Pauses()

    @property
    def version(self) -> int:
        return self.engine.version

    def open(self, prompt_ids: Sequence[int]) -> Session:
        return self.engine.open(prompt_ids)

    def fork(self, session: Session, n: int) -> list[Session]:
        return self.engine.fork(session, n)

    def append(self, session: Session, token_ids: Sequence[int]) -> None:
        self.engine.append(session, token_ids)

    def close(self, session: Session) -> None:
        job = session.job
        self._pauses.end(session)
        self.engine.close(session)
        if job is not None:
            self._deliver(job)

    def update(self, weights: Weights) -> None:
        """Copy the tensors, unless the engine drives the very module that holds them; kept KV is stale either way."""
        load_weights(self.engine.model, weights)
        self.engine.weights_changed(weights.version)

    def sleep(self) -> None:
        self.engine.sleep()

    def wake(self) -> None:
        self.engine.wake()

    async def sample(self, session: Session, params: SamplingParams) -> Turn:
        self._pauses.end(session)
        job = self.engine.submit(session, params)
        if job.finish is not None:
            return job.result()
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Turn] = loop.create_future()
        self._waiters[job] = waiter
        if self._driver is None or self._driver.done() or self._driver.get_loop() is not loop:
            self._driver = loop.create_task(self._drive())
        try:
            return await waiter
        finally:
            self._waiters.pop(job, None)
            self.engine.cancel(job)

    async def _drive(self) -> None:
        """Step while somebody waits. A failed step fails every turn under way, not the loop."""
        await asyncio.sleep(0)  # callers that start together are batched from the first step
        while self._waiters:
            try:
                ended = self.engine.step()
            except Exception as error:
                for waiter in list(self._waiters.values()):
                    if not waiter.done():
                        waiter.set_exception(error)
                return
            for job in ended:
                self._deliver(job)
            await asyncio.sleep(0)
            await self._pauses.wait()

    def _deliver(self, job: Job) -> None:
        waiter = self._waiters.get(job)
        if waiter is not None and not waiter.done():
            self._pauses.begin(job.session)
            waiter.set_result(job.result())


_MOST = 8  # pauses that outvote all others that are remembered


class Pauses:
    """Sessions between two turns: their caller runs a tool, or is about to close them.

    A step waits a moment for them while they usually come back at once. So a quick tool's answer joins
    the very next step whatever the threads' timing: batches are fuller, and the same seed gives the
    same batches, hence the same numbers to the last bit. Slow tools hold nobody up.
    """

    def __init__(self, quick_s: float = 0.05, patience_s: float = 1.0) -> None:
        self._quick_s = quick_s
        self._patience_s = patience_s
        # Judged by the median: a busy machine makes a quick tool slow now and then, a slow tool is slow each time.
        self._lately: deque[float] = deque([0.0] * _MOST, maxlen=2 * _MOST - 1)
        self._since: dict[Session, float] = {}
        self._awaited: set[Session] = set()
        self._over = asyncio.Event()

    def begin(self, session: Session) -> None:
        self._since[session] = time.perf_counter()
        self._awaited.add(session)

    def end(self, session: Session) -> None:
        began = self._since.pop(session, None)
        if began is not None:
            self._lately.append(time.perf_counter() - began)
        self._awaited.discard(session)
        if not self._awaited:
            self._over.set()

    async def wait(self) -> None:
        """Until all are back, or patience runs out; who is not back then is not waited for again."""
        if self._awaited and median(self._lately) < self._quick_s:
            self._over = asyncio.Event()  # belongs to the loop that waits
            try:
                await asyncio.wait_for(self._over.wait(), self._patience_s)
            except TimeoutError:  # once is enough: nobody waits until as many have been quick again
                self._lately.extend([self._patience_s] * _MOST)
        self._awaited.clear()
