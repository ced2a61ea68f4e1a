"""Sessions of policies whose server keeps nothing between the turns: token lists, held here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from palestra.core.errors import RolloutError
from palestra.core.types import SamplingParams, Turn


@dataclass(slots=True)
class TokenSession:
    """The tokens of one conversation; every turn sends all of them."""

    token_ids: list[int]


class TokenSessions:
    """The part of a policy that is only bookkeeping; what is left to it are `sample`, `update` and `version`."""

    def open(self, prompt_ids: Sequence[int]) -> TokenSession:
        return TokenSession([int(i) for i in prompt_ids])

    def fork(self, session: TokenSession, n: int) -> list[TokenSession]:
        return [TokenSession(list(session.token_ids)) for _ in range(n)]

    def append(self, session: TokenSession, token_ids: Sequence[int]) -> None:
        session.token_ids += [int(i) for i in token_ids]  # `list += array` would add number by number

    def close(self, session: TokenSession) -> None:
        """Nothing is held for it anywhere."""

    def sleep(self) -> None:
        """The server decides over its memory."""

    def wake(self) -> None: ...


class BoundedSessions(TokenSessions):
    """Of a model that takes `_context` tokens: what is left to it instead of `sample` is `_sample`."""

    version: int
    _context: int

    async def sample(self, session: TokenSession, params: SamplingParams) -> Turn:
        ids = session.token_ids
        if not ids:
            raise RolloutError("a prompt without tokens cannot be continued; give it at least one")
        left = self._context - len(ids)
        if left <= 0:
            return Turn("model", (), (), self.version, "length")  # type: ignore[arg-type]
        turn = await self._sample(ids, replace(params, max_new_tokens=min(params.max_new_tokens, left)))
        ids += turn.token_ids.tolist()
        return turn

    async def _sample(self, ids: list[int], params: SamplingParams) -> Turn:
        """A turn that goes on from these tokens."""
        raise NotImplementedError
