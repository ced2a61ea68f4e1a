"""The processes that train one model together, as everyone sees them; `train/ranks.py` has the ones of torchrun.

Every rank runs the same program on the same groups and samples, so what is decided from these is decided alike. The
first one alone writes files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from palestra.core.errors import PalestraError

T = TypeVar("T")
LAUNCHER = "PALESTRA_LAUNCHER"  # the process that `palestra train --nproc` started the ranks from
RENDEZVOUS = "PALESTRA_RENDEZVOUS"  # the file by which its ranks find each other; ranks of torchrun have none


class RankFailed(PalestraError):
    """The failure of a run over several ranks. All of them have it, so that only the first need report it."""


class Ranks(Protocol):
    """This process among those that train together. All ranks call the same methods in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def device(self) -> Any:
        """The torch device of this rank; None where the config alone says it."""
        ...

    @property
    def is_first(self) -> bool:
        """Whether this is the one that writes files and prints."""
        ...

    @property
    def stop_requested(self) -> bool:
        """Whether this rank has been asked to stop; the ranks agree on it when they next gather groups."""
        ...

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank, on each of them."""
        ...

    def from_first(self, work: Callable[[], T]) -> T:
        """What the first rank finds, on every rank; its error is everyone's."""
        ...

    @contextmanager
    def interruptible(self, cancel: Callable[[], None]) -> Iterator[None]:
        """`cancel` is called, in any thread, when this rank is asked to stop or loses another one meanwhile."""
        ...

    @contextmanager
    def guarded(self, on_end: Callable[[str], None]) -> Iterator[None]:
        """All ranks are inside together: if one fails or dies, all end, with its reason.

        Ctrl-C and SIGTERM are remembered until the ranks agree. `on_end` is called with the reason before a rank that
        is stuck is ended.
        """
        ...


@dataclass(frozen=True, slots=True)
class OneProcess:
    """No other ranks: Ctrl-C raises where it arrives, and everything else is a call."""

    rank: int = 0
    size: int = 1
    device: Any = None
    is_first: bool = True
    stop_requested: bool = False

    def gather(self, value: T) -> list[T]:
        return [value]

    def from_first(self, work: Callable[[], T]) -> T:
        return work()

    @contextmanager
    def interruptible(self, cancel: Callable[[], None]) -> Iterator[None]:
        yield

    @contextmanager
    def guarded(self, on_end: Callable[[str], None]) -> Iterator[None]:
        yield


ONE_PROCESS: Ranks = OneProcess()


@dataclass(frozen=True, slots=True)
class RankVariables:
    """What torchrun's variables say about this process."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def of_environment(cls) -> RankVariables | None:
        """None for a process that trains alone."""
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if not all(name in os.environ for name in names) or os.environ["WORLD_SIZE"] == "1":
            return None
        try:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            local = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", size))
        except ValueError as error:
            raise PalestraError(
                f"RANK, WORLD_SIZE and their like are not numbers ({error}); start with torchrun"
            ) from None
        return cls(rank, size, *local)


def is_first_rank() -> bool:
    """Whether this process writes files and prints; also before the ranks have met."""
    place = RankVariables.of_environment()
    return place is None or place.rank == 0


def refuse_ranks(what: str, remedy: str) -> None:
    """PalestraError where several processes would each do by themselves what one should."""
    if place := RankVariables.of_environment():
        raise PalestraError(f"{what} runs in one process, and this is one of {place.size} ranks; {remedy}")
