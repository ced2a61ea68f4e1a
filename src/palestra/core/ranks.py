"""This process among those that train together. Alone it is the only one; `extras/ranks` has the ranks of torchrun.

Every rank runs the same program on the same groups and samples, so what is decided from these is decided alike. The
first one alone writes files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from palestra.core.errors import ServiceError, SettingError, UnsupportedError
from palestra.core.extras import provided

if TYPE_CHECKING:
    from palestra.core.config import RunConfig

T = TypeVar("T")


class RankFailed(ServiceError):
    """The failure of a run over several ranks. All of them have it, so that only the first need report it."""


@dataclass(eq=False)
class Ranks:
    """This process among those that train together. All ranks call the same methods in the same order.

    As it stands it is a process that trains alone: Ctrl-C raises where it arrives, and the collectives are plain calls.
    """

    rank: int = 0
    size: int = 1
    device: Any = None  # the torch device of this rank; None where the config alone decides it
    stop_requested: bool = False  # of this rank; the ranks agree on it when they next gather groups

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files and prints."""
        return self.rank == 0

    def gather(self, value: T, kind: Any = None) -> list[T]:
        """All-gather: the values of all ranks, by rank, on each of them; without a `kind` a barrier.

        `kind` is their type, for `core/codec.py`. A value that it cannot send is an error of every rank.
        """
        return [value]

    def from_first(self, work: Callable[[], T], kind: Any = None) -> T:
        """Broadcast the result of the first rank, which has this type; its error is raised on every rank."""
        return work()

    @contextmanager
    def interruptible(self, cancel: Callable[[], object]) -> Iterator[None]:
        """Call `cancel`, in any thread, when this rank is asked to stop or loses another one in the meantime."""
        yield

    @contextmanager
    def guarded(self, on_end: Callable[[str], None]) -> Iterator[None]:
        """All ranks are inside together: if one fails or dies, all end, with its reason.

        Ctrl-C and SIGTERM are remembered until the ranks agree. `on_end` is called with the reason before a rank that
        is stuck is ended.
        """
        yield


ONE_PROCESS = Ranks()


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
            raise SettingError(f"RANK, WORLD_SIZE, … are not numbers ({error}); start with torchrun") from None
        return cls(rank, size, *local)


def join(config: RunConfig) -> Ranks:
    """The ranks that this process is one of; `ONE_PROCESS` where it was started alone."""
    place = RankVariables.of_environment()
    return ONE_PROCESS if place is None else provided("several ranks").join(place, config)


def is_first_rank() -> bool:
    """Whether this process writes files and prints; also before the ranks have met."""
    place = RankVariables.of_environment()
    return place is None or place.rank == 0


def refuse_ranks(what: str, remedy: str) -> None:
    """PalestraError where several processes would each do by themselves what one should."""
    if place := RankVariables.of_environment():
        raise UnsupportedError(f"{what} runs in one process, and this is one of {place.size} ranks; {remedy}")
