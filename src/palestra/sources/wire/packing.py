"""Which groups make the next batch: whole groups, oldest first, exactly `batch_size` sequences. Pure.

>>> queue = [Queued(1, 0, 4), Queued(2, 0, 3), Queued(3, 1, 4)]
>>> [group.id for group in next_batch(queue, 8)]
[1, 3]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Queued:
    """A queued group: its number, its environment, how many sequences it has, and the bytes of its body."""

    id: int
    env_id: int | None
    sequences: int
    size: int = 0


def next_batch(
    queue: Sequence[Queued], batch_size: int, minimums: Mapping[int, float] | None = None
) -> list[Queued] | None:
    """The groups of the next batch in the order in which they came; None when no exact batch can be made yet.

    `minimums` gives environments a share of each batch (0 to 1) that is theirs. Where taking the oldest
    groups would leave one of them with less, each of them gets the smallest amount that covers its share,
    and the others fill the rest.
    """
    oldest = _oldest_exactly(queue, batch_size)
    required = _required_sequences(minimums or {}, batch_size)
    if oldest is None or all(_count(oldest, env_id) >= least for env_id, least in required.items()):
        return oldest
    return _with_minimums(queue, batch_size, required)


def _oldest_exactly(queue: Sequence[Queued], total: int) -> list[Queued] | None:
    """The oldest groups that add up to `total`: out of the shortest run that can, each one that can be in is in.

    A set of reachable sums is an integer whose bit s says that s can be reached.
    """
    if total == 0:
        return []
    goal, everything = 1 << total, (1 << (total + 1)) - 1
    sums = 1
    for end, group in enumerate(queue, 1):
        sums |= (sums << group.sequences) & everything
        if sums & goal:
            return _earliest(queue[:end], total)
    return None


def _earliest(groups: Sequence[Queued], total: int) -> list[Queued]:
    everything = (1 << (total + 1)) - 1
    behind = [1]  # sums that the groups after this one can reach, built from the end
    for group in reversed(groups):
        behind.append((behind[-1] | behind[-1] << group.sequences) & everything)
    behind.reverse()
    taken: list[Queued] = []
    left = total
    for i, group in enumerate(groups):
        if group.sequences <= left and behind[i + 1] >> (left - group.sequences) & 1:
            taken.append(group)
            left -= group.sequences
    return taken


def _with_minimums(queue: Sequence[Queued], batch_size: int, required: Mapping[int, int]) -> list[Queued] | None:
    pools = [[g for g in queue if g.env_id == env_id] for env_id in required]
    pools.append([g for g in queue if g.env_id not in required])
    least = [*required.values(), 0]
    reachable = [_sums(pool, batch_size) >> low << low for pool, low in zip(pools, least, strict=True)]
    amounts = _split(reachable, batch_size)
    if amounts is None:
        return None
    parts = [_oldest_exactly(pool, amount) for pool, amount in zip(pools, amounts, strict=True)]
    return sorted((group for part in parts for group in part or []), key=lambda group: group.id)


def _split(reachable: Sequence[int], total: int) -> list[int] | None:
    """One reachable amount for each pool, together `total`; the first pools get as little as works."""
    everything = (1 << (total + 1)) - 1
    behind = [1]
    for sums in reversed(reachable):
        added = 0
        for amount in _amounts(sums):
            added |= behind[-1] << amount
        behind.append(added & everything)
    behind.reverse()
    if not behind[0] >> total & 1:
        return None
    amounts = []
    for sums, rest in zip(reachable, behind[1:], strict=True):
        amount = next(a for a in _amounts(sums) if a <= total and rest >> (total - a) & 1)
        amounts.append(amount)
        total -= amount
    return amounts


def _amounts(sums: int) -> list[int]:
    return [s for s in range(sums.bit_length()) if sums >> s & 1]


def _sums(groups: Sequence[Queued], total: int) -> int:
    sums, everything = 1, (1 << (total + 1)) - 1
    for group in groups:
        sums |= (sums << group.sequences) & everything
    return sums


def _required_sequences(minimums: Mapping[int, float], batch_size: int) -> dict[int, int]:
    """Shares as sequences; shares of more than the whole batch are scaled down together."""
    scale = 1.0 / max(1.0, sum(minimums.values()))
    counts = {env_id: int(batch_size * share * scale + 1e-9) for env_id, share in minimums.items()}
    return {env_id: count for env_id, count in counts.items() if count}


def _count(groups: Sequence[Queued], env_id: int) -> int:
    return sum(group.sequences for group in groups if group.env_id == env_id)
