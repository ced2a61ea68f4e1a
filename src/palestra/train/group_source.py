"""The GroupSource seam: where scored groups come from, and the one place that refills and drops them.

Our own agent loop, a user's `rollout_func` and the trajectory wire are sources; `group_queue` is a queue around one.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from palestra.core.config import RunConfig
from palestra.core.config_sections import TrainSection
from palestra.core.errors import StateError
from palestra.core.types import Group, Problem, Rollout, oldest_version
from palestra.evals.case_rates import CaseRates, Choice, retest_size
from palestra.rollout.collect import GroupCollector, any_good, require_one_good
from palestra.train.batch import group_advantages, has_signal
from palestra.train.credit import AdvantageFunction, with_custom_advantages, with_role_advantages, with_turn_advantages
from palestra.train.watcher import Watcher

DRAWS_UNTIL_ONE_IS_GOOD = 3
T = TypeVar("T")


class GroupSource:
    """A source of scored groups. Its state lets a resumed run continue with the same next groups."""

    __slots__ = ()
    refills: bool = False  # more groups can be asked for where some have no signal
    gives_back: bool = False  # more groups may be drawn than are needed, and the last ones given back
    max_staleness: int | None = None  # how many policy versions a group may lag behind; None: any
    # How many groups may be in progress together. Above 1 `state` moves on with the call of `next` itself, so that a
    # queue can call it again before the first has ended. 0: no queue may be around it.
    concurrent: int = 0
    reward_weights: Mapping[str, float]
    is_done: bool = False  # it has no more groups, so the run ends

    def next(self, count: int, version: int) -> Coroutine[Any, Any, list[Group]]:
        """About `count` groups; `version` is that of the policy now. A source that makes batches gives a whole one."""
        raise NotImplementedError

    async def prepare(self, count: int) -> None:
        """Make ready what the next `count` groups need, while the learner works. `state` stays as it is."""

    def give_back(self, count: int) -> None:
        """The last `count` groups will not be used: their problems come again."""

    def observe(self, groups: Sequence[Group], advantages: Sequence[Sequence[float]], step: int) -> None:
        """Called with the groups of each step, before they are learned."""

    def state(self) -> dict[str, Any]:
        raise NotImplementedError

    def restore(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def commit(self) -> None:
        """All that was handed out so far is in a checkpoint, and need not be kept."""

    def close(self) -> None: ...


@dataclass(slots=True)
class ProblemSource(GroupSource):
    """Problems of an environment in an endless shuffled stream, attempted by a collector."""

    collector: GroupCollector
    problems: Sequence[Problem]
    reward_weights: Mapping[str, float]
    group_size: int
    seed: int
    drawn: int = 0  # problems so far; with the seed it fixes what comes next
    refills: bool = True
    gives_back: bool = True
    max_staleness: int | None = 0
    concurrent: int = 1024
    watcher: Watcher = field(default_factory=Watcher)
    on_close: Callable[[], None] = lambda: None
    rates: CaseRates | None = None  # with train.sampling = learnable: they choose the problems
    tried: int = 0  # with rates: problems of the stream that were drawn once; the others are untested
    _in_progress: dict[str, int] = field(default_factory=dict)  # index by id of what was drawn and not yet seen again

    def _show(self, rollout: Rollout) -> None:
        self.watcher.rollout()

    def next(self, count: int, version: int) -> Coroutine[Any, Any, list[Group]]:
        keys = [f"{self.seed}/{self.drawn + i}" for i in range(count)]
        if self.rates is not None:
            chosen = self._choose(count)
            self.tried += sum(choice.is_fresh for choice in chosen)
            self.drawn += count
            self._in_progress |= {self.problems[choice.index].id: choice.index for choice in chosen}
            return self._collect_chosen(chosen, keys)
        problems = draw(self.problems, self.drawn, count, self.seed)
        self.drawn += count
        return self.collector.collect(problems, self.group_size, keys, self._show)

    def _choose(self, count: int) -> list[Choice]:
        assert self.rates is not None
        size = len(self.problems)
        order = _order(size, self.seed, 0)
        untested = [order[i] for i in range(self.tried, min(self.tried + count, size))]
        if not untested and not self.rates.cases:  # all are in progress
            return [Choice(order[(self.drawn + i) % size]) for i in range(count)]
        key = f"{self.seed}/{self.drawn}"
        return self.rates.choose(count, untested, key, self.group_size, without=self._in_progress)

    async def _collect_chosen(self, chosen: Sequence[Choice], keys: Sequence[str]) -> list[Group]:
        """Whole groups first, then the few attempts at cases whose outcome is nearly certain."""
        groups: dict[int, Group] = {}
        for retests, size in ((False, self.group_size), (True, retest_size(self.group_size))):
            places = [i for i, choice in enumerate(chosen) if choice.retests == retests]
            problems = [self.problems[chosen[i].index] for i in places]
            if problems:
                found = await self.collector.collect(problems, size, [keys[i] for i in places], self._show)
                groups |= dict(zip(places, found, strict=True))
        return [groups[i] for i in range(len(chosen))]

    def observe(self, groups: Sequence[Group], advantages: Sequence[Sequence[float]], step: int) -> None:
        """Learn from the groups of a step which problems are worth sampling."""
        if self.rates is not None:
            known = {case: evidence.index for case, evidence in self.rates.cases.items()}
            signals = [has_signal(group, row) for group, row in zip(groups, advantages, strict=True)]
            self.rates.observe(groups, signals, step, lambda case: self._in_progress.pop(case, known.get(case)))

    async def prepare(self, count: int) -> None:
        problems = draw(self.problems, self.drawn, count, self.seed)
        if self.rates is not None:
            problems = [self.problems[choice.index] for choice in self._choose(count) if not choice.retests]
        await self.collector.prepare(problems, self.group_size)

    def give_back(self, count: int) -> None:
        self.drawn -= count

    def state(self) -> dict[str, Any]:
        return {"cursor": self.drawn} | ({} if self.rates is None else {"tried": self.tried})

    def restore(self, state: Mapping[str, Any]) -> None:
        self.drawn, self.tried = int(state.get("cursor", 0)), int(state.get("tried", 0))
        self._in_progress = {}

    def close(self) -> None:
        self.collector.abandon()
        self.on_close()


@dataclass(slots=True)
class NoMoreGroups(GroupSource):
    """The source of a run that takes no more steps: it only keeps the state of the one before."""

    position: Mapping[str, Any] = field(default_factory=dict)
    reward_weights: Mapping[str, float] = field(default_factory=dict)

    async def next(self, count: int, version: int) -> list[Group]:
        raise StateError("this run takes no more steps")

    def state(self) -> dict[str, Any]:
        return dict(self.position)

    def restore(self, state: Mapping[str, Any]) -> None:
        self.position = state


@dataclass(frozen=True, slots=True)
class Credit:
    """Groups with the advantage of each rollout, and of its tokens where these differ."""

    groups: Sequence[Group]
    advantages: Sequence[Sequence[float]]


def assign_credit(
    groups: Sequence[Group],
    train: TrainSection,
    weights: Mapping[str, float],
    function: AdvantageFunction | None = None,
) -> Credit:
    """The advantages of groups by the settings, or by a user's function on top of them."""
    if any(score.roles for group in groups for r in group.rollouts for score in r.scores.values()):
        groups = with_role_advantages(groups, train, weights)
    advantages = group_advantages(groups, train, weights)
    if train.credit != "rollout":
        groups = with_turn_advantages(groups, advantages, train, weights)
    if function is not None:
        groups = with_custom_advantages(groups, advantages, train, weights, function)
    return Credit(groups, advantages)


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """The groups of one step with their advantages, the number of stale ones dropped, and the time it took.

    Groups are not in its repr, which `asyncio.Runner` makes of the result of each run: it would take milliseconds.
    """

    groups: Sequence[Group] = field(repr=False)
    advantages: Sequence[Sequence[float]] = field(repr=False)  # of every rollout, by group
    dropped: int
    seconds: float
    signal_rate: float = 1.0  # the share of the groups whose rewards differ


async def gather(
    source: GroupSource,
    count: int,
    config: RunConfig,
    version: int,
    signal_rate: float = 1.0,
    function: AdvantageFunction | None = None,
) -> StepRollouts:
    """Groups for one step: stale ones are dropped, and fresh ones drawn while too few have signal, within the limit.

    Where every rollout failed, a judge that is away for a moment for instance, other problems are tried before the
    run ends. Drawing again takes as long as the longest rollout, so as many are drawn at once as by `signal_rate` (the
    share of groups with signal, of the step before) it takes; those behind the last that is needed are given back.
    `function` is a user's, for the advantages: it is called for each draw, and again for all groups of the step.
    """
    train, began = config.train, time.perf_counter()
    limit = math.inf if source.max_staleness is None else source.max_staleness
    refills = train.filter_equal_groups and not config.distill_only  # a teacher needs no differing rewards
    budget = count * (1 + train.refill_limit) if refills else count
    needed = math.ceil(train.signal_share * count)
    groups: list[Group] = []
    fresh: list[Group] = []
    credit = Credit((), ())
    drawn = dropped = good = usable = 0
    while (good < needed or len(groups) < count) and (
        drawn < budget or (drawn < DRAWS_UNTIL_ONE_IS_GOOD * count and groups and not usable)
    ):
        missing, least = max(0, needed - good), max(1, count - usable)
        most = budget - drawn if source.gives_back and drawn < budget else count
        asked = draw_size(missing, signal_rate, least, most)
        fresh = []
        for group in await source.next(asked, version):
            oldest = oldest_version(group.rollouts)
            if oldest is None or version - oldest <= limit:
                fresh.append(group)
            else:
                dropped += 1
        credit = assign_credit(fresh, train, source.reward_weights, function)
        signals = list(map(has_signal, credit.groups, credit.advantages))
        used = len(fresh)
        if source.gives_back and asked > least and sum(signals) > missing:
            used = asked = max(least, 1 + [i for i, signal in enumerate(signals) if signal][missing - 1])
            source.give_back(len(fresh) - used)
        drawn += asked
        good += sum(signals[:used])
        for group in fresh[:used]:
            groups.append(group)
            usable += any_good([group])
        signal_rate = good / max(1, len(groups))
        if not source.refills:
            break
    require_one_good(groups)
    if fresh != groups:  # there were several draws, or some groups were given back
        credit = assign_credit(groups, train, source.reward_weights, function)
    return StepRollouts(credit.groups, credit.advantages, dropped, time.perf_counter() - began, signal_rate)


def draw_size(missing: int, signal_rate: float, least: int, most: int) -> int:
    """How many groups to draw so that `missing` of them have signal: `least` if as many are likely among them, else so
    many that it comes true five times out of six, and never above `most`."""
    rate = max(signal_rate, 1 / most)
    if rate * least >= missing:
        return min(least, most)
    return min(math.ceil((missing + math.sqrt(missing * (1 - rate))) / rate), most)


def draw(problems: Sequence[T], start: int, count: int, seed: int) -> list[T]:
    """Items `start` to `start + count` of an endless stream that is reshuffled each epoch."""
    size = len(problems)
    items = []
    for number in range(start, start + count):
        epoch, place = divmod(number, size)
        items.append(problems[_order(size, seed, epoch)[place]])
    return items


@lru_cache(maxsize=2)  # every step asks for that of its epoch, the last one of an epoch for two
def _order(size: int, seed: int, epoch: int) -> Sequence[int]:
    order = list(range(size))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
