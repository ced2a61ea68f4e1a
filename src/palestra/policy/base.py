"""The Policy seam: open a session, sample, append, close. And sessions that are only token lists, for servers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from palestra.core.errors import RolloutError
from palestra.core.types import SamplingParams, Turn
from palestra.core.weights import Weights

Session = TypeVar("Session")  # callers read nothing of it but `token_ids`, the tokens that it holds


class Policy(Generic[Session]):
    """Continues token sequences. Implementations override what raises here, and the defaults where they can do more.

    >>> session = policy.open(prompt_ids)            # doctest: +SKIP
    >>> first, second = policy.fork(session, 2)      # share the prompt, then continue independently
    >>> turn = await policy.sample(first, SamplingParams(max_new_tokens=64))
    >>> policy.append(first, tool_result_ids)        # the sampled ids are already in the session
    >>> turn = await policy.sample(first, SamplingParams(max_new_tokens=64))
    >>> policy.close(first)
    """

    context_tokens: int | None = None  # the model's context length where only the policy knows it (another machine)
    can_branch: bool = False  # whether `branch` is implemented
    samples_groups: bool = False  # elsewhere, by its `group_collector`, not turn by turn

    @property
    def version(self) -> int:
        """The version of the weights that are sampled now."""
        raise NotImplementedError

    def open(self, prompt_ids: Sequence[int]) -> Session:
        raise NotImplementedError

    def fork(self, session: Session, n: int) -> list[Session]:
        """n independent sessions that continue from here; closes the session itself."""
        raise NotImplementedError

    def branch(self, session: Session, length: int) -> Session:
        """A session of the first `length` tokens that shares their KV cache. The session itself stays as it is, also
        while it is being sampled. Callers open a new session of a policy that cannot: its server has a prefix cache."""
        raise NotImplementedError

    async def sample(self, session: Session, params: SamplingParams) -> Turn:
        """Sample one turn; its ids become part of the session. Concurrent calls are batched."""
        raise NotImplementedError

    def begin(self, session: Session, params: SamplingParams) -> asyncio.Future[Turn]:
        """Begin to sample one turn; cancelling the future cancels it."""
        return asyncio.ensure_future(self.sample(session, params))

    async def follow(self, session: Session) -> None:
        """Keep `token_ids` up to date during the `sample` call that has just begun, for a stream of its text.

        Returns once the call was accepted or refused. Sessions of this process are always up to date.
        """
        await asyncio.sleep(0)

    def append(self, session: Session, token_ids: Sequence[int]) -> None:
        """Add tokens that the model did not sample."""
        raise NotImplementedError

    def close(self, session: Session) -> None:
        """Free what is held for a session."""

    def update(self, weights: Weights) -> None:
        """Sample with these weights from now on, turns in progress included."""
        raise NotImplementedError

    def sleep(self) -> None:
        """Free the KV cache's memory until `wake`. Sessions stay open; no turn is sampled in between."""

    def wake(self) -> None: ...

    def skip_tool_barrier(self, session: Session) -> None:
        """Do not hold back a step for this session: its caller will probably not continue it."""

    def group_collector(self, config: Any, task: Any, training: bool, groups_at_once: Any) -> Any:
        """The collector of a policy that samples whole groups elsewhere."""
        raise NotImplementedError

    def release(self) -> None:
        """Free what is held outside of this process (adapters at a server, actors) at the end of a run."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of consecutive tokens: the logprob of each, and the most likely in its place as (id, logprob), best first."""

    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)


@dataclass(slots=True)
class TokenSession:
    """The tokens of one conversation; every turn sends all of them."""

    token_ids: list[int]


class TokenSessions(Policy[TokenSession]):
    """A policy whose server keeps nothing between turns. Subclasses add `sample` and `update`."""

    def open(self, prompt_ids: Sequence[int]) -> TokenSession:
        return TokenSession([int(i) for i in prompt_ids])

    def fork(self, session: TokenSession, n: int) -> list[TokenSession]:
        return [TokenSession(list(session.token_ids)) for _ in range(n)]

    def append(self, session: TokenSession, token_ids: Sequence[int]) -> None:
        session.token_ids += [int(i) for i in token_ids]  # `list += array` would add number by number


class BoundedSessions(TokenSessions):
    """For a model with a context of `_context` tokens. Subclasses add `_sample` instead of `sample`."""

    version: int = 0
    _context: int

    async def sample(self, session: TokenSession, params: SamplingParams) -> Turn:
        ids = session.token_ids
        if not ids:
            raise RolloutError("the prompt is empty; it needs at least one token")
        left = self._context - len(ids)
        if left <= 0:
            return Turn("model", (), (), self.version, "length")  # type: ignore[arg-type]
        turn = await self._sample(ids, replace(params, max_new_tokens=min(params.max_new_tokens, left)))
        ids += turn.token_ids.tolist()
        return turn

    async def _sample(self, ids: list[int], params: SamplingParams) -> Turn:
        """A turn that continues these tokens."""
        raise NotImplementedError
