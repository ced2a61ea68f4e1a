"""Sessions of policies whose server keeps nothing between the turns: token lists, held here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
