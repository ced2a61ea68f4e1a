"""The tokens around a plain reply, found once for all replies in the same place: a tool's results differ by little."""

from __future__ import annotations

import numpy as np

from palestra.core.types import Turn
from palestra.models.chat.remembered import remembered
from palestra.models.chat.segments import MAX_CHARS_WITH_GIL, SegmentTokenizer

_PLAIN = "7"  # stands for any plain reply: it makes no added token with what is around it


class Surroundings:
    """What a template writes before and behind one reply.

    A text is tokenised between its added tokens; the reply shares such a segment with what stands next to it, and only
    this segment is tokenised anew.
    """

    def __init__(self, segments: SegmentTokenizer, before: str, behind: str, *, without_first: bool) -> None:
        """`without_first`: the first token before the reply is there already."""
        *opening, left = segments.segments(before + _PLAIN)
        right, *ending = segments.segments(_PLAIN + behind)
        self._segments = segments
        self._left, self._right = left.removesuffix(_PLAIN), right.removeprefix(_PLAIN)
        self._before = [i for segment in opening for i in segments.known(segment)]
        self._behind = [i for segment in ending for i in segments.known(segment)]
        self._fits = bool(self._before) or not without_first  # else the first token is one of the reply's segment
        if without_first:
            del self._before[:1]
        self._made: dict[tuple[int, ...], Turn] = {}

    def turns(self, reply: str) -> tuple[Turn, ...] | None:
        """The reply as an `environment` turn between two of the template; None where it is not so simple."""
        if len(reply) > MAX_CHARS_WITH_GIL:
            return None
        encoded = self._segments.encode(self._left + reply + self._right)
        first, end = len(self._left), len(self._left) + len(reply)
        inside = [first <= a < b <= end for a, b in encoded.offsets]
        count = sum(inside)
        if not self._fits or not count:
            return None
        at, ids = inside.index(True), encoded.ids
        if not all(inside[at : at + count]):
            return None
        before, behind = (*self._before, *ids[:at]), (*ids[at + count :], *self._behind)
        own = Turn("environment", np.array(ids[at : at + count], np.int32))
        return tuple(turn for turn in (self._turn(before), own, self._turn(behind)) if len(turn.token_ids))

    def _turn(self, ids: tuple[int, ...]) -> Turn:
        """Nearly always the same as for the reply before."""
        return remembered(self._made, ids, lambda: Turn("template", np.array(ids, np.int32)))
