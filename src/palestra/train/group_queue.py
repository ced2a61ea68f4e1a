"""Groups ahead of their step: a queue around a source, so that it samples while tools run and the learner works.

Groups are begun and handed out in one order, `max_staleness` steps' worth ahead: slow problems are trained as often as
quick ones, and as every step takes `per_step` groups or more, none is older than `max_staleness` versions.
Finished groups are in a journal until a checkpoint holds their steps. A run that was killed trains exactly the same
groups again, in the same steps, and samples only those that were still in progress.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from palestra.core.codec import decode, encode
from palestra.core.group_codec import group_from_record
from palestra.core.journal import Journal
from palestra.core.types import Group
from palestra.train.group_source import GroupSource

_TABLES = """
CREATE TABLE IF NOT EXISTS draws (number INTEGER PRIMARY KEY, after TEXT NOT NULL, groups TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS committed (number INTEGER NOT NULL);
"""
_NUMBER = "queue"  # the key of the queue's own number in the state


@dataclass(frozen=True, slots=True)
class Draw:
    """One call of the source: its state afterwards, and the groups once they are there and on disk."""

    after: Mapping[str, Any]
    groups: asyncio.Future[list[Group]]


class GroupQueue(GroupSource):
    """A GroupSource around another. `steps_left` counts the step that is gathered for, None where there is no last."""

    def __init__(
        self,
        source: GroupSource,
        *,
        per_step: int,
        max_staleness: int,
        journal_file: Path | None = None,
        steps_left: Callable[[], int | None] = lambda: None,
    ) -> None:
        self.max_staleness = max_staleness
        self.refills, self.reward_weights = source.refills, source.reward_weights
        self._source = source
        self._per_step = per_step
        self._steps_left = steps_left
        self._journal_file = journal_file
        self._journal: Journal | None = None
        self._slots = asyncio.Semaphore(source.concurrent)
        self._line: list[Draw] = []  # begun and not handed out
        self._finished: dict[int, tuple[dict[str, Any], list[Group]]] = {}  # by an earlier process of the run
        self._is_open = False
        self._number = 0  # draws that were handed out
        self._after: Mapping[str, Any] = source.state()  # the source's state behind them
        self._saved = 0  # the number in the last state that was given

    async def next(self, count: int, version: int) -> list[Group]:
        self._open()
        left, ahead = self._steps_left(), self.max_staleness or 0
        steps_ahead = ahead if left is None else min(ahead, left - 1)
        while len(self._line) < count + steps_ahead * self._per_step:
            self._line.append(self._begin(version))
        taken = self._line[:count]
        groups = [group for draw in taken for group in await asyncio.shield(draw.groups)]
        del self._line[:count]
        self._number += count
        self._after = taken[-1].after
        return groups

    def observe(self, groups: Sequence[Group], advantages: Sequence[Sequence[float]], step: int) -> None:
        self._source.observe(groups, advantages, step)

    def _begin(self, version: int) -> Draw:
        number = self._number + len(self._line)
        if number in self._finished:
            after, groups = self._finished.pop(number)
            self._source.restore(after)
            done: asyncio.Future[list[Group]] = asyncio.get_running_loop().create_future()
            done.set_result(groups)
            return Draw(after, done)
        sampling = self._source.next(1, version)
        after = self._source.state()
        return Draw(after, asyncio.create_task(self._sample(number, after, sampling)))

    async def _sample(
        self, number: int, after: Mapping[str, Any], sampling: Coroutine[Any, Any, list[Group]]
    ) -> list[Group]:
        try:
            async with self._slots:
                groups = await sampling
        finally:
            sampling.close()  # where it was cancelled before it began
        if self._journal is not None:

            def add(db: sqlite3.Connection) -> None:
                row = (number, json.dumps(dict(after)), encode(groups))
                db.execute("INSERT OR REPLACE INTO draws VALUES (?, ?, ?)", row)

            await self._journal.do(add)
        return groups

    async def drained(self) -> None:
        """Until nothing is in progress: what is measured then has the machine and the environment to itself."""
        await asyncio.gather(*(draw.groups for draw in self._line), return_exceptions=True)

    def state(self) -> dict[str, Any]:
        self._saved = self._number
        return {**self._after, _NUMBER: self._number}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._cancel()
        self._number = self._saved = int(state.get(_NUMBER, 0))
        self._source.restore({key: value for key, value in state.items() if key != _NUMBER})
        self._after = self._source.state()
        self._is_open = False

    def commit(self) -> None:
        if self._journal is not None:
            self._journal.do_now(partial(_commit, self._saved))

    def close(self) -> None:
        self._cancel()
        if self._journal is not None:
            self._journal.close()
        self._source.close()

    def _open(self) -> None:
        """Take over what an earlier process of the run has sampled; not before the first draw, when the run's folder is
        locked and its checkpoint chosen."""
        if self._is_open or self._journal_file is None:
            return
        self._is_open = True
        if self._journal is None:
            self._journal = Journal(self._journal_file, _TABLES, remedy="restore it from a copy, or delete it")

        def draws(db: sqlite3.Connection) -> dict[int, tuple[dict[str, Any], list[Group]]]:
            rows = db.execute("SELECT * FROM draws")
            return {number: (json.loads(after), _groups(stored)) for number, after, stored in rows}

        self._journal.do_now(partial(_commit, self._number))
        self._finished = self._journal.read(draws)

    def _cancel(self) -> None:
        for draw in self._line:
            if not draw.groups.cancel() and not draw.groups.cancelled():
                draw.groups.exception()  # marks it as read
        self._line = []


def _groups(stored: bytes | str) -> list[Group]:
    """Groups of the journal; earlier versions wrote them as JSON."""
    if isinstance(stored, str):
        return list(map(group_from_record, json.loads(stored)))
    groups: list[Group] = decode(stored, list[Group])
    return groups


def _commit(number: int, db: sqlite3.Connection) -> None:
    """The draws before this number are in a checkpoint; after that of an earlier number, none is of use any more."""
    [[committed]] = db.execute("SELECT max(number) FROM committed")
    db.execute("DELETE FROM draws WHERE number < ? OR ? < ?", (number, number, committed or 0))
    db.execute("DELETE FROM committed")
    db.execute("INSERT INTO committed VALUES (?)", (number,))
