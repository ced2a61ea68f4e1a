"""The rollout engine: tokens in, tokens and logprobs out, KV cached in between.

>>> engine = Engine(model)                                    # doctest: +SKIP
>>> group = engine.fork(engine.open(prompt_ids), 8)           # the prompt is computed once
>>> turns = engine.sample(group, SamplingParams(max_new_tokens=64))
>>> engine.append(group[0], tool_result_ids)                  # continues from cached KV
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from palestra.core.errors import (
    ContextLengthError,
    InputError,
    ResourceError,
    SettingError,
    StateError,
    UnsupportedModel,
)
from palestra.core.machine import phases
from palestra.core.types import Finish, Grammar, SamplingParams, Turn
from palestra.engine.attention import unchunked_context
from palestra.engine.check import check_logprobs
from palestra.engine.cpu.runner import CpuRunner
from palestra.engine.recurrent import state_bytes
from palestra.engine.routing import ExpertRouting, RoutingRecord
from palestra.engine.runner import GIB, Runner, default_kv_bytes
from palestra.engine.sampler import StopStrings, check_params
from palestra.engine.scheduler import Scheduler
from palestra.engine.session import Chunk, Collect, Emission, Job, PagePool, Session, no_emissions
from palestra.engine.state_slots import StateSlots
from palestra.engine.supported import NO_EXACT, CacheTooLarge, KVShape, kv_shape, text_config

T = TypeVar("T")
STATE_SHARE = 1 / 2  # of the KV memory, at most, for recurrent states
MIN_STATE_SLOTS = 8  # the self-check's sessions and their snapshots
log = logging.getLogger(__name__)


class Step(NamedTuple):
    """A step that has begun."""

    chunks: Sequence[Chunk]
    emissions: Collect


def no_grammars(text: str) -> Grammar:
    raise SettingError("this engine was built without a grammar compiler; leave SamplingParams.grammar out")


def build_runner(
    model: nn.Module, shape: KVShape, pages: int, page_size: int, max_running: int, context: int, exact: bool,
    state_slots: int, routing: ExpertRouting | None,
) -> Runner:  # fmt: skip
    """The runner for the device that the model is on."""
    if next(model.parameters()).device.type != "cuda":
        if exact:
            raise UnsupportedModel(f"model.exact has no kernels for a CPU; {NO_EXACT}")
        return CpuRunner(model, shape, pages, page_size, state_slots, routing)
    from palestra.engine.cuda.runner import CudaRunner

    return CudaRunner(model, shape, pages, page_size, max_running, context, exact, state_slots, routing)


def divide_memory(shape: KVShape, memory: float, page_size: int, max_running: int) -> tuple[int, int]:
    """(pages, slots of recurrent state) for so much memory, in bytes.

    Half of it at most is for states: running sessions, and as many snapshots and a quarter more.
    """
    size, slots = state_bytes(shape.states), 0
    if size:
        slots = max(MIN_STATE_SLOTS, min(int(memory * STATE_SHARE // size), max_running * 9 // 4))
    pages = int((memory - slots * size) // (shape.bytes_per_token * page_size))
    return max(1, pages), slots


class Engine:
    """Samples from the module that is trained. One thread drives it: submit, step, take results."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        kv_memory_gib: float | None = None,
        page_size: int | None = None,
        max_running: int | None = None,
        tokens_per_step: int | None = None,
        max_context: int | None = None,
        compile_grammar: Callable[[str], Grammar] = no_grammars,
        keep_closed: bool = False,
        exact: bool = False,
        record_routing: bool = False,
        self_check: bool = True,
    ) -> None:
        """With `keep_closed` the KV of closed sessions stays as long as there is room: who opens one with the same
        beginning, the next turn of a conversation for instance, computes what is new. A training's do not come back.
        `exact`: logprobs are those of the learner, to the bit.
        `record_routing`: turns have the experts of the tokens that were computed for them (mixtures of experts)."""
        device = next(model.parameters()).device
        max_running = max_running or (256 if device.type == "cpu" else 1024)
        tokens_per_step = tokens_per_step or (2048 if device.type == "cpu" else 16384)
        shape = kv_shape(model).of_one_width() if device.type == "cuda" else kv_shape(model)
        config = text_config(model)
        self.model = model
        self.version = 0
        self.vocabulary: int = config.vocab_size
        limits = (max_context, getattr(config, "max_position_embeddings", None))
        self.context: int = min((limit for limit in limits if limit), default=1 << 20)
        chunk = unchunked_context(config)
        if chunk is not None and chunk < self.context:
            self.context = chunk
            log.warning(
                "%s attends in chunks: conversations end at %d tokens; model.engine = plain has no limit (slower)",
                config.model_type,
                chunk,
            )
        size = page_size or (16 if device.type == "cpu" else 64)
        memory = kv_memory_gib * GIB if kv_memory_gib is not None else default_kv_bytes(device)
        pages, state_slots = divide_memory(shape, memory, size, max_running)
        slots = state_slots + 1  # one of no session
        self._routing = ExpertRouting(model) if record_routing else None
        self.runner: Runner = build_runner(
            model, shape, pages, size, max_running, self.context, exact, slots, self._routing
        )
        states = StateSlots(self.runner.states, state_slots) if state_slots else None
        pool = PagePool(pages, size)
        self.scheduler = Scheduler(pool, self.runner.memory, max_running, tokens_per_step, self.context, states)
        self._stops = StopStrings(tokenizer)
        self._compile_grammar = compile_grammar
        self._keep_closed = keep_closed
        self._asleep = self._warned = self._shrunk = False
        if not self_check:
            return
        try:
            check_logprobs(self, model, size, self._capacity)
        except UnsupportedModel as error:
            if not self.runner.disable_fast_path():
                raise
            log.warning("the fast decoder is wrong; falling back to the module's own layers (slower): %s", error)
            check_logprobs(self, model, size, self._capacity)

    @property
    def pool(self) -> PagePool:
        return self.scheduler.pool

    @property
    def _capacity(self) -> int:
        """The most tokens that one session may have."""
        return min(self.context, self.pool.pages * self.pool.page_size)

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def open(self, prompt_ids: Sequence[int]) -> Session:
        """A session that starts with these tokens. Nothing is computed until it is sampled."""
        ids = self._valid_ids(prompt_ids)
        limit = self._capacity
        if not ids:
            raise InputError("the prompt is empty; a session needs at least one token to continue from")
        if len(ids) >= limit:
            where = "the model's context" if limit == self.context else "the engine's KV memory (kv_memory_gib)"
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens; {where} holds {limit}, a sampled one included; shorten it",
                limit,
                len(ids),
            )
        return Session(ids, routing=self._new_record())

    def fork(self, session: Session, n: int) -> list[Session]:
        """Return n sessions that continue from here, and close the session."""
        if n < 1:
            raise SettingError(f"fork into n={n} sessions; expected 1 or more")
        self._check_idle(session)
        session.closed = True
        session.forks = session.children = n
        return [Session(list(session.token_ids), source=session, routing=self._new_record()) for _ in range(n)]

    @torch.inference_mode()
    def branch(self, session: Session, length: int) -> Session:
        """A session of the first `length` tokens that shares their computed KV; the session itself stays open."""
        if session.closed:
            raise StateError("the session is closed; branch one that is open, or open a new one")
        if not 1 <= length <= len(session.token_ids):
            held = len(session.token_ids)
            raise SettingError(f"branch at length={length}; expected 1 to {held}, the tokens that the session holds")
        branched = Session(session.token_ids[:length], routing=self._new_record())
        if branched.routing is not None and session.routing is not None:
            branched.routing.inherit(session.routing, length)
        self.scheduler.branch(session, branched)
        return branched

    def append(self, session: Session, token_ids: Sequence[int]) -> None:
        """Add tokens that the model did not make; they are computed with the next sample."""
        self._check_idle(session)
        session.token_ids += self._valid_ids(token_ids)

    @torch.inference_mode()
    def close(self, session: Session) -> None:
        """Give the session's pages back; a turn in progress ends as cancelled. Closing twice is harmless."""
        if session.closed:
            return
        if session.job is not None:
            self.cancel(session.job)
        session.closed = True
        self._release(session)

    def submit(self, session: Session, params: SamplingParams) -> Job:
        """Queue one turn; `step` until it has a `finish`."""
        self._check_idle(session)
        check_params(params, self._stops.usable)
        job = Job(session, params, len(session.token_ids))
        job.matching = self._compile_grammar(params.grammar).start() if params.grammar is not None else None
        if len(session.token_ids) >= self.context:
            job.finish = "length"
        else:
            self.scheduler.submit(job)
        return job

    @torch.inference_mode()
    def cancel(self, job: Job) -> None:
        """Stop a turn; what it sampled stays in the session, and its KV in the cache."""
        if job.finish is None:
            self._end(job, "cancelled")

    def step(self) -> list[Job]:
        """One step of every session that can run; the turns that ended with it."""
        step = self.launch()
        return self.truncate_when_cache_full() if step is None else self.collect(step)

    @torch.inference_mode()
    def launch(self) -> Step | None:
        """Begin a step of every session that can run; None if there is none.

        Until it is collected, only sessions that take no part in it may be opened, submitted, appended to or closed;
        all may be branched.
        """
        if self._asleep:
            raise StateError("the engine sleeps and has no KV memory; call wake before sampling")
        with phases("planning"):
            chunks = self.scheduler.plan(self.runner.decode_steps)
        if not chunks:
            return None
        emissions = self._within_memory(partial(self.runner.launch, chunks))
        return Step((), no_emissions) if emissions is None else Step(chunks, emissions)

    @torch.inference_mode()
    def collect(self, step: Step, until_one_ends: bool = True) -> list[Job]:
        """Wait for a step and return the turns that ended with it; by default the step continues until one does."""
        emissions = self._within_memory(partial(step.emissions, until_one_ends))
        if emissions is None:
            return []
        with phases("planning"):
            ended = [e.job for e in emissions if self._accept(e)]
            for chunk in step.chunks:
                if chunk.job.params is None and chunk.job.pending <= 0:
                    self.scheduler.withdraw(chunk.job)
        return ended

    def sample(self, sessions: Sequence[Session], params: SamplingParams | Sequence[SamplingParams]) -> list[Turn]:
        """Sample one turn of each session and wait for all."""
        each = [params] * len(sessions) if isinstance(params, SamplingParams) else params
        jobs = [self.submit(session, p) for session, p in zip(sessions, each, strict=True)]
        while any(job.finish is None for job in jobs):
            self.step()
        return [job.result() for job in jobs]

    @torch.inference_mode()
    def weights_changed(self, version: int) -> None:
        """The model's weights are new: all cached KV is stale and will be computed again."""
        self.version = version
        self.scheduler.drop_all()
        self.runner.weights_changed()

    @torch.inference_mode()
    def sleep(self) -> None:
        """Give the KV cache's memory back; sessions stay, and are computed again after `wake`."""
        if not self._asleep:
            self.scheduler.drop_all()
            self.runner.release_memory()
            self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self._reserve(self.pool.pages)
            self._asleep = False

    def _within_memory(self, part: Callable[[], T]) -> T | None:
        """Run part of a step; on CUDA out of memory halve the KV cache and return None."""
        try:
            return part()
        except torch.OutOfMemoryError:
            pass  # handled out here, where nothing holds the frames in which it happened, and so their tensors
        self.scheduler.drop_all()
        self.runner.release_memory()
        self._reserve(self.pool.pages // 2)
        return None

    def _reserve(self, pages: int) -> None:
        """Reserve memory for `pages` pages of KV, halving the number until it fits, down to what one session needs."""
        before, size = self.pool.pages, self.pool.page_size
        longest = max((len(job.session.token_ids) for job in self.scheduler.waiting), default=0)
        while True:
            if pages <= self.pool.needed(longest + 1):
                raise ResourceError(
                    f"CUDA out of memory: a KV cache of {pages * size} tokens does not hold a rollout of {longest}; "
                    "lower rollout.max_new_tokens, or set model.sleep_mode"
                )
            try:
                self.runner.reserve_memory(pages)
                break
            except CacheTooLarge:
                pages //= 2
        if pages == before:
            return
        self.scheduler.pool = PagePool(pages, size)
        log.log(
            logging.INFO if self._shrunk else logging.WARNING,
            "CUDA out of memory while sampling: the KV cache has room for %d tokens from now on instead of %d "
            "(model.kv_memory_gib); what is in progress is computed again",
            pages * size,
            before * size,
        )
        self._shrunk = True

    def _accept(self, emission: Emission) -> bool:
        """Add sampled tokens to the session up to the one that ends the turn; true if one does."""
        job = emission.job
        if job.finish is not None or job.params is None:
            return False
        session, params = job.session, job.params
        if job.matching is not None:
            for token in emission.token_ids:
                job.matching.accept(token)
        # Runners end at stop ids and limits, so without stop strings only the last token can end the turn.
        step = 1 if params.stop else max(1, len(emission.token_ids))
        for i in range(0, len(emission.token_ids), step):
            tokens = emission.token_ids[i : i + step]
            session.token_ids += tokens
            job.logprobs += emission.logprobs[i : i + step]
            job.versions += [self.version] * len(tokens)
            if tokens[-1] in params.stop_token_ids or (
                params.stop and self._stops.found(session.token_ids[job.start :], params.stop)
            ):
                self._end(job, "stop")
                return True
            if len(job.logprobs) >= params.max_new_tokens or len(session.token_ids) >= self.context:
                self._end(job, "length")
                return True
        return False

    def _end(self, job: Job, finish: Finish) -> None:
        job.finish = finish
        session = job.session
        if session.kv_len >= len(session.token_ids):  # decode steps may have gone past the end
            session.kv_len = len(session.token_ids) - 1
            if self.scheduler.states is not None:
                self.scheduler.states.invalidate(session)
        if self._routing is not None and session.routing is not None:
            computed = len(session.token_ids) - 1
            session.routing.truncate(computed)
            job.routing = session.routing.take(computed, self._routing.unknown)
        self.scheduler.withdraw(job)

    @torch.inference_mode()
    def truncate_when_cache_full(self) -> list[Job]:
        """No session could run: the pages do not hold even one. Its turn ends as truncated."""
        stuck = next(iter([*self.scheduler.running, *self.scheduler.waiting]), None)
        if stuck is None:
            return []
        if not self._warned:
            self._warned = True
            log.warning(
                "the KV cache (%d tokens) is too small for one rollout: a turn is cut off after %d tokens, finish="
                "'length', and so will others; raise model.kv_memory_gib, or lower rollout.max_new_tokens",
                self.pool.pages * self.pool.page_size,
                len(stuck.session.token_ids),
            )
        if stuck.params is not None:
            self._end(stuck, "length")
            return [stuck]
        children = [job for job in self.scheduler.waiting if job.session.source is stuck.session]
        self.scheduler.withdraw(stuck)
        for job in children:
            self._end(job, "length")
        return children

    def _new_record(self) -> RoutingRecord | None:
        return None if self._routing is None else RoutingRecord()

    def _release(self, session: Session) -> None:
        """Give pages back; the source's too when its last child is gone."""
        self.scheduler.keep_closed(session) if self._keep_closed else self.scheduler.drop(session)
        source, session.source = session.source, None
        if source is not None:
            source.children -= 1
            if source.children == 0:
                if source.job is not None:
                    self.scheduler.withdraw(source.job)
                self._release(source)

    def _valid_ids(self, token_ids: Iterable[int]) -> list[int]:
        """The tokens as a new list of ints; PalestraError if one is outside the vocabulary.

        Each pass over a prompt of a million tokens blocks the event loop for milliseconds, so there are few.
        """
        ids = list(token_ids)
        if not set(map(type, ids)) <= {int}:  # numpy's integers
            ids = list(map(int, ids))
        for token in (min(ids, default=0), max(ids, default=0)):
            if not 0 <= token < self.vocabulary:
                raise InputError(
                    f"token id {token} is outside the vocabulary 0..{self.vocabulary - 1}; use the model's tokenizer"
                )
        return ids

    def _check_idle(self, session: Session) -> None:
        if session.closed:
            raise StateError("the session is closed (fork closes the session that it copies); open a new one")
        if session.job is not None:
            raise StateError("the session is being sampled; wait for its turn to end, or fork it before sampling")
