"""The policy of this process for another one of this machine: sessions are kept here, calls travel over a channel."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from palestra.core.channel import Channel, Handlers
from palestra.core.types import SamplingParams, Turn
from palestra.policy.base import Policy, TokenLogprobs

FAMILY = 1 << 20  # numbers for the forks of one session
_PUSH_S = 0.01  # between new tokens of a turn that is followed


@dataclass(eq=False, slots=True)
class RemoteSession:
    """The tokens of a session of the other process. `unsent` were appended since its last turn."""

    number: int
    token_ids: list[int]
    unsent: array[int] = field(default_factory=partial(array, "i"))


class ChannelPolicy(Policy[RemoteSession]):
    """The policy at the other end of a channel, served by `PolicyServer`.

    A refusal of `open`, `fork`, `branch` or `append` is raised by the next `sample`. Session numbers follow the order
    of opening; worker `place` of several has every `workers`-th of them.
    """

    can_branch = True
    version: int = 0  # of the policy, when the newest job began
    channel: Channel  # is opened with the handlers of this policy

    def __init__(self, place: int = 0, workers: int = 1) -> None:
        self.first_number = 0
        self._place = place
        self._workers = workers
        self._opened = 0
        self._followed: dict[int, RemoteSession] = {}

    @property
    def handlers(self) -> Handlers:
        return {"tokens": self._add_tokens}

    def begin_job(self, version: int, first_number: int) -> None:
        """Number later sessions from here on."""
        self.version, self.first_number, self._opened = version, first_number, 0

    def open(self, prompt_ids: Sequence[int]) -> RemoteSession:
        session = RemoteSession(self._next_number(), [int(i) for i in prompt_ids])
        self.channel.send("open", session.number, _bytes(session.token_ids))
        return session

    def fork(self, session: RemoteSession, n: int) -> list[RemoteSession]:
        self._send_appended(session)
        first = self._next_number()
        self.channel.send("fork", session.number, n, first)
        return [RemoteSession(first + i, list(session.token_ids)) for i in range(n)]

    def branch(self, session: RemoteSession, length: int) -> RemoteSession:
        self._send_appended(session)
        branched = RemoteSession(self._next_number(), session.token_ids[:length])
        self.channel.send("branch", session.number, length, branched.number)
        return branched

    def append(self, session: RemoteSession, token_ids: Sequence[int]) -> None:
        new = [int(i) for i in token_ids]
        session.token_ids += new
        session.unsent.extend(new)

    async def sample(self, session: RemoteSession, params: SamplingParams) -> Turn:
        start, unsent = len(session.token_ids), session.unsent.tobytes()
        session.unsent = array("i")
        call, reply = self.channel.call("sample", session.number, unsent, params, returns=tuple[Turn, int])
        turn: Turn
        try:
            turn, length = await reply
        except asyncio.CancelledError:
            self.channel.cancel(call)
            raise
        finally:
            self._followed.pop(session.number, None)
        session.token_ids[start:] = turn.token_ids.tolist()
        if len(session.token_ids) != length:
            raise RuntimeError(f"the session holds {length} tokens at the policy and {len(session.token_ids)} here")
        return turn

    async def follow(self, session: RemoteSession) -> None:
        await asyncio.sleep(0)  # the call of `sample` is sent before
        self._followed[session.number] = session
        await self.channel.call("follow", session.number, len(session.token_ids))[1]

    async def score(
        self, token_ids: Sequence[int], start: int, *, top: int = 0, temperature: float = 1.0
    ) -> AsyncIterator[TokenLogprobs]:
        """The logprobs of tokens, in one piece."""
        yield await self.channel.call("score", _bytes(token_ids), start, top, temperature, returns=TokenLogprobs)[1]

    def skip_tool_barrier(self, session: RemoteSession) -> None:
        self.channel.send("skip_tool_barrier", session.number)

    def close(self, session: RemoteSession) -> None:
        self.channel.send("close", session.number)

    def _send_appended(self, session: RemoteSession) -> None:
        if session.unsent:
            self.channel.send("append", session.number, session.unsent.tobytes())
            session.unsent = array("i")

    def _add_tokens(self, number: int, token_ids: bytes) -> None:
        if (session := self._followed.get(number)) is not None:
            session.token_ids += _ids(token_ids)

    def _next_number(self) -> int:
        self._opened += 1
        return self.first_number + (self._opened * self._workers + self._place) * FAMILY


class PolicyServer:
    """The sessions of one `ChannelPolicy` at a policy of this process, in its event loop.

    With `numbered`, the other end's numbers decide the order of rows in the sampler's batches, so that they do not
    depend on which process was quicker. `scorer` gives the logprobs of tokens.
    """

    channel: Channel

    def __init__(
        self, policy: Policy[Any], *, numbered: bool = False, scorer: Callable[..., Awaitable[Any]] | None = None
    ) -> None:
        self._policy = policy
        self._numbered = numbered
        self._scorer = scorer
        self._sessions: dict[int, Any] = {}  # or the error that kept one from being opened
        self._turns: dict[int, asyncio.Future[Turn]] = {}  # the last one of each session
        self._followed: dict[int, int] = {}  # tokens of the session that the other end has
        self._timer: asyncio.TimerHandle | None = None

    @property
    def handlers(self) -> Handlers:
        """The methods that messages name."""
        names = ("open", "fork", "branch", "append", "close", "skip_tool_barrier", "sample", "follow", "score", "ping")
        return {name: getattr(self, f"_{name}") for name in names}

    def close(self) -> None:
        """Close all sessions, after the channel was closed, which cancels their turns."""
        for number in list(self._sessions):
            self._close(number)
        if self._timer is not None:
            self._timer.cancel()

    def _open(self, number: int, token_ids: bytes) -> None:
        self._make([number], lambda: [self._policy.open(_ids(token_ids))])

    def _fork(self, number: int, n: int, first: int) -> None:
        session, _ = self._sessions.pop(number), self._turns.pop(number, None)
        self._make(range(first, first + n), lambda: self._policy.fork(session, n), session, ends_source=True)

    def _branch(self, number: int, length: int, branch: int) -> None:
        session = self._sessions[number]
        self._make([branch], lambda: [self._policy.branch(session, length)], session)

    def _append(self, number: int, token_ids: bytes) -> None:
        session = self._sessions[number]

        def append() -> list[Any]:
            self._policy.append(session, _ids(token_ids))
            return [session]

        self._make([number], append, session, ends_source=True)

    def _make(
        self, numbers: Sequence[int], make: Callable[[], list[Any]], source: Any = None, ends_source: bool = False
    ) -> None:
        """Number the sessions of an operation, or remember its error for `sample`."""
        made: list[Any]
        try:
            made = [source] * len(numbers) if isinstance(source, Exception) else make()
        except Exception as error:
            made = [error] * len(numbers)
            if ends_source and not isinstance(source, Exception):
                self._policy.close(source)
        for number, session in zip(numbers, made, strict=True):
            self._sessions[number] = session
            if self._numbered and not isinstance(session, Exception):
                session.number = number

    def _close(self, number: int) -> None:
        self._followed.pop(number, None)
        self._turns.pop(number, None)
        session = self._sessions.pop(number, None)
        if session is not None and not isinstance(session, Exception):
            self._policy.close(session)

    def _skip_tool_barrier(self, number: int) -> None:
        session = self._sessions[number]
        if not isinstance(session, Exception):
            self._policy.skip_tool_barrier(session)

    def _sample(self, call: int, number: int, unsent: bytes, params: SamplingParams) -> None:
        """Begin a turn; no task is made for it."""
        if unsent:
            self._append(number, unsent)
        session = self._sessions[number]
        if isinstance(session, Exception):
            raise session
        turn = self._turns[number] = self._policy.begin(session, params)
        self.channel.answer(call, turn, lambda turn: (turn, len(session.token_ids)))

    def _score(self, call: int, token_ids: bytes, start: int, top: int, temperature: float) -> None:
        assert self._scorer is not None
        self.channel.answer(call, self._scorer(_ids(token_ids), start, top, temperature))

    def _ping(self, call: int) -> None:
        self.channel.reply(call, None)

    def _follow(self, call: int, number: int, known: int) -> None:
        """Push new tokens of a session until its turn ends; the reply comes after a refusal of the turn."""
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, self.channel.reply, call, None)
        if number in self._turns:
            self._followed[number] = known
        if self._timer is None:
            self._timer = loop.call_later(_PUSH_S, self._push)

    def _push(self) -> None:
        self._followed = {number: n for number, n in self._followed.items() if not self._turns[number].done()}
        for number, known in self._followed.items():
            if new := self._sessions[number].token_ids[known:]:
                self._followed[number] += len(new)
                self.channel.send("tokens", number, _bytes(new))
        self._timer = asyncio.get_running_loop().call_later(_PUSH_S, self._push) if self._followed else None


def _bytes(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()


def _ids(token_ids: bytes) -> list[int]:
    return memoryview(token_ids).cast("i").tolist()
