"""A session is a token sequence with cached KV; a job is one sampling turn of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from palestra.core.types import Array, Finish, Matching, SamplingParams, Turn
from palestra.engine.routing import RoutingRecord


@dataclass(eq=False, slots=True)
class Session:
    """Tokens, and how many of them have their KV in pages.

    A forked session has a `source`: the sequence that it and its siblings go on from. The source is
    computed once; each child inherits its pages. `shared_len` is how many leading tokens were inherited. A branch
    shares pages, too, when it is made, and is independent from then on.
    """

    token_ids: list[int]
    source: Session | None = None
    table: list[int] = field(default_factory=list)
    kv_len: int = 0
    shared_len: int = 0
    forks: int = 0  # that were made of it
    children: int = 0  # of those, who may still need this source
    closed: bool = False
    job: Job | None = None
    running: bool = False  # in the scheduler's batch
    slot: int = -1  # of contiguous KV on the CPU
    state: int = -1  # slot of the recurrent state after `kv_len` tokens, if the model has one
    snapshots: dict[int, int] = field(default_factory=dict)  # length -> slot of the state after so many tokens
    wanted: set[int] = field(default_factory=set)  # lengths at which a snapshot is to be taken
    routing: RoutingRecord | None = None  # the experts of its tokens, if the engine records them
    number: int = field(default_factory=itertools.count().__next__)  # in the order in which they were opened

    @property
    def fill_target(self) -> int:
        """KV that children inherit: all but the last token, which each child computes to sample from."""
        return len(self.token_ids) - 1


@dataclass(eq=False, slots=True)
class Job:
    """One turn in progress. `params=None` only computes KV (a shared prompt)."""

    session: Session
    params: SamplingParams | None
    start: int
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # of the weights that sampled each token
    finish: Finish | None = None
    matching: Matching | None = None
    routing: Array | None = None  # of the tokens that were computed for it, once it has ended
    only_temperature: bool = field(init=False)  # of its params; every step asks for it

    def __post_init__(self) -> None:
        self.only_temperature = self.params is None or self.params.only_temperature

    @property
    def pending(self) -> int:
        """Tokens to compute before the next one can be sampled (or before the fill is done)."""
        end = len(self.session.token_ids) if self.params is not None else self.session.fill_target
        return end - self.session.kv_len

    def result(self) -> Turn:
        if self.finish is None:
            raise RuntimeError("the turn is still being sampled")
        ids = self.session.token_ids[self.start : self.start + len(self.logprobs)]
        return Turn("model", ids, self.logprobs, self.versions, self.finish, self.routing)  # type: ignore[arg-type]


@dataclass(eq=False, slots=True)
class Chunk:
    """What one session does in one step: compute `count` tokens from its `kv_len` on, then perhaps sample.

    `snapshot` is a slot for the recurrent state behind all of these tokens but the one that is sampled from.
    """

    job: Job
    count: int
    samples: bool
    snapshot: int | None = None


class Emission(NamedTuple):
    """Tokens that a job sampled in one step, oldest first."""

    job: Job
    token_ids: list[int]
    logprobs: list[float]


# Waits for a launched step and returns what each sampling chunk emitted. If the argument is true, a runner that decodes
# several steps continues until a turn ends.
Collect = Callable[[bool], list[Emission]]


def no_emissions(until_one_ends: bool) -> list[Emission]:
    """The result of a step in which no session samples."""
    return []
