"""Stop strings: does the newest text contain one?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from palestra.core.errors import PalestraError


class StopStrings:
    """Decodes the tail of a turn and looks. A token has at least one byte, so a short tail is enough."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def usable(self) -> bool:
        return self._tokenizer is not None

    def found(self, turn_ids: Sequence[int], stop: Sequence[str]) -> bool:
        """True when the turn's newest token completed a stop string."""
        if self._tokenizer is None:
            raise PalestraError("stop strings need a tokenizer; give the engine one, or use stop_token_ids")
        longest = max(len(text.encode()) for text in stop)
        tail = self._tokenizer.decode(list(turn_ids[-longest - 4 :]), skip_special_tokens=False)
        return any(text in tail for text in stop)
