"""The Policy seam: open a conversation, sample, append, close."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from palestra.core.types import SamplingParams, Turn
from palestra.core.weights import Weights


class HoldsTokens(Protocol):
    """All that a caller may look at in a session: the tokens that it holds."""

    @property
    def token_ids(self) -> Sequence[int]: ...


Session = TypeVar("Session", bound=HoldsTokens)


class Policy(Protocol[Session]):
    """Something that continues token sequences. Sessions show their tokens and no more.

    >>> session = policy.open(prompt_ids)            # doctest: +SKIP
    >>> first, second = policy.fork(session, 2)      # share the prompt, go on apart
    >>> turn = await policy.sample(first, SamplingParams(max_new_tokens=64))
    >>> policy.append(first, tool_result_ids)        # the sampled ids are already in the session
    >>> turn = await policy.sample(first, SamplingParams(max_new_tokens=64))
    >>> policy.close(first)
    """

    @property
    def version(self) -> int:
        """The version of the weights that sample now."""
        ...

    def open(self, prompt_ids: Sequence[int]) -> Session: ...

    def fork(self, session: Session, n: int) -> list[Session]:
        """n independent sessions that go on from here; the session itself is closed by this."""
        ...

    async def sample(self, session: Session, params: SamplingParams) -> Turn:
        """Sample one turn; its ids become part of the session. Concurrent calls are batched."""
        ...

    def append(self, session: Session, token_ids: Sequence[int]) -> None:
        """Add tokens that the model did not make."""
        ...

    def close(self, session: Session) -> None: ...

    def update(self, weights: Weights) -> None:
        """Sample with these weights from now on; turns in progress go on with them."""
        ...

    def sleep(self) -> None:
        """Give the KV cache's memory back until `wake`: sessions stay open, and nobody samples meanwhile."""
        ...

    def wake(self) -> None: ...


@runtime_checkable
class KnowsContext(Protocol):
    """A policy whose model is on another machine, so that only it knows how many tokens that can hold at once."""

    context_tokens: int


@runtime_checkable
class Branches(Protocol):
    """A policy that goes on from the middle of a session without computing its beginning again.

    Of others a new session is opened: a server has a prefix cache of its own, or computes all of it anyway.
    """

    def branch(self, session: Any, length: int) -> Any:
        """A session of the first `length` tokens. The session itself goes on, also where it is being sampled."""
        ...


@runtime_checkable
class Releases(Protocol):
    """A policy that holds something outside of this process until the run ends: adapters at a server, actors."""

    def release(self) -> None: ...


@runtime_checkable
class WaitsForTools(Protocol):
    """A policy whose steps wait a moment for sessions between two turns, as long as these usually come back at once."""

    def away(self, session: Any) -> None:
        """This one will hardly come back: nobody waits for it."""
        ...
