"""Between environments and a trainer: registrations, queued groups, the next batch. Without HTTP."""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from palestra.core.errors import InputError, NotFoundError, ResourceError, SettingError
from palestra.core.journal import Journal
from palestra.extras.atropos import journal
from palestra.extras.atropos.journal import Queued
from palestra.extras.atropos.protocol import EnvRegistration, Registration, ScoredGroup

log = logging.getLogger("palestra")

MIB = 1 << 20
_MIN_WEIGHT = 0.01  # an environment with weight 0 would stop sampling
_MAX_ENVS = 10_000
_MAX_DEATHS = 3  # of a trainer on one batch, after which the batch is taken for the cause


class QueueFull(ResourceError):
    """The queue, or the list of environments, is at its limit; the sender should try again."""


class UnknownEnv(NotFoundError):
    """An env_id that was never registered."""


class RegisteredEnv(EnvRegistration):
    id: int
    name: str
    desired_name: str
    weight: float
    connected: bool = True


class Delivery(NamedTuple):
    """One batch: its number, and the groups as JSON."""

    number: int
    groups: list[bytes]


@dataclass(frozen=True, slots=True)
class PostedGroup:
    """A checked group as JSON, and what the queue must know of it."""

    env_id: int | None
    sequences: int
    longest: int  # tokens of its longest sequence
    body: bytes

    @classmethod
    def of(cls, group: ScoredGroup) -> PostedGroup:
        return cls(group.env_id, len(group.tokens), group.longest, group.model_dump_json().encode())


class Exchange:
    """The state of the trajectory API: in memory to decide quickly, in the journal to survive.

    A group whose post was answered is on disk, and goes into exactly one batch. A batch is kept until the trainer
    has it in a checkpoint (`take(after=N, saved=M)`), so a lost response, a killed server or a killed trainer loses
    nothing. The protocol's own `GET /batch` cannot say so: it gets each batch once. A batch on which a trainer
    died three times is moved to a separate file.
    """

    def __init__(self, folder: Path, max_waiting: int = 65_536, max_waiting_mib: int = 4096) -> None:
        self.journal = Journal(folder / "trajectories.sqlite", journal.TABLES, remedy="choose another --folder")
        self.folder = folder
        self.max_waiting = max_waiting
        self.max_bytes = max_waiting_mib * MIB
        self.accepted = 0  # groups since this process has started
        self._writing = self._writing_bytes = 0  # sequences and bytes on their way to the disk
        self._taking = asyncio.Lock()
        self._load()

    def _load(self) -> None:
        facts = self.journal.read(journal.facts)
        registration = facts.get("registration")
        self.registration = Registration(**registration) if registration else None
        self.envs = [RegisteredEnv(**env) for env in self.journal.read(journal.envs)]
        self.started = bool(facts.get("started", False))
        self.step = int(facts.get("step", 0))
        self.last_batch = int(facts.get("last_batch", 0))
        self.counted = int(facts.get("counted", self.last_batch))  # the last batch that `step` has counted
        self.held = int(facts.get("held", 0))  # the batch that the trainer works on; 0: it asks for the next
        self.suspect: Sequence[int] = facts.get("suspect", (0, 0))  # a batch, and deaths on it
        self._is_back = False  # a trainer has registered, and not asked for a batch yet
        self.waiting, self._unsaved, self.latest = self.journal.read(journal.queue)
        self.waiting_sequences = sum(group.sequences for group in self.waiting)
        self.waiting_bytes = sum(group.size for group in self.waiting)

    async def _set(self, **facts: Any) -> None:
        """Change facts, here and in the journal."""
        for name, value in facts.items():
            setattr(self, name, value)
        await self.journal.do(lambda db: journal.set_facts(db, **facts))

    def close(self) -> None:
        self.journal.close()

    async def register(self, registration: Registration) -> int:
        """A trainer, new or resumed: its settings hold from now on; what waits is kept.

        A resumed one gets the batches since its last checkpoint again. They are not for another run.
        """
        async with self._taking:
            if self.registration is not None and self.registration.checkpoint_dir != registration.checkpoint_dir:
                await self._delete(self.last_batch)
            self._is_back = True
            await self._set(registration=registration, step=registration.starting_step, counted=0)
        return uuid.uuid4().int

    async def register_env(self, request: EnvRegistration) -> RegisteredEnv | None:
        """None until a trainer has requested its first batch."""
        if self.registration is None or not self.started:
            return None
        if len(self.envs) >= _MAX_ENVS:
            raise QueueFull(f"{_MAX_ENVS} environments have registered; reset the API, or give it another --folder")
        desired = request.desired_name or "env"
        alike = sum(env.desired_name == desired for env in self.envs)
        named = {"id": len(self.envs), "name": f"{desired}_{alike}", "desired_name": desired}
        weight = 1.0 if request.weight is None else request.weight
        env = RegisteredEnv(**request.model_dump() | named | {"weight": weight})
        self.envs.append(env)
        await self.journal.do(lambda db: journal.save_env(db, env.model_dump()))
        return env

    async def disconnect_env(self, env_id: int) -> None:
        env = self.envs[env_id] = self.env(env_id).model_copy(update={"connected": False})
        await self.journal.do(lambda db: journal.save_env(db, env.model_dump()))

    def env(self, env_id: int) -> RegisteredEnv:
        if not 0 <= env_id < len(self.envs):
            raise UnknownEnv(f"env_id={env_id} is not registered here; register with POST /register-env first")
        return self.envs[env_id]

    async def add(self, groups: Sequence[PostedGroup], key: str | None = None) -> bool:
        """Queue groups, all or none; True once they are on disk, False when this `key` was already accepted."""
        for group in groups:
            if group.env_id is not None:
                self.env(group.env_id)
            if self.registration is None:
                continue
            if group.sequences > self.registration.batch_size:
                raise InputError(
                    f"the group has {group.sequences} sequences, a batch {self.registration.batch_size}; groups are "
                    "not split, so it could never be delivered"
                )
            if group.longest > self.registration.max_token_len > 0:
                raise InputError(
                    f"a sequence has {group.longest} tokens; the trainer takes {self.registration.max_token_len} "
                    "(max_token_len of GET /info)"
                )
        sequences, size = sum(g.sequences for g in groups), sum(len(g.body) for g in groups)
        full = None
        if self.waiting_sequences + self._writing + sequences > self.max_waiting:
            full = f"{self.waiting_sequences} sequences wait already and {self.max_waiting} may"
        elif self.waiting_bytes + self._writing_bytes + size > self.max_bytes:
            full = f"{self.waiting_bytes // MIB} MiB wait already and {self.max_bytes // MIB} may"
        if full:
            raise QueueFull(f"{full}; try again when the trainer has taken some")
        self._writing, self._writing_bytes = self._writing + sequences, self._writing_bytes + size
        rows = [(group.env_id, group.sequences, group.body) for group in groups]
        try:
            queued = await self.journal.do(lambda db: journal.add_groups(db, rows, key))
        finally:
            self._writing, self._writing_bytes = self._writing - sequences, self._writing_bytes - size
        if queued is None:
            return False
        self.waiting += queued
        self.waiting_sequences += sequences
        self.waiting_bytes += size
        self.accepted += len(queued)
        self.latest = groups[-1].body if groups else self.latest
        return True

    async def take(
        self, after: int | None = None, saved: int | None = None, step: int | None = None
    ) -> Delivery | None:
        """The next batch, None while there is none.

        `after` is the number of the last batch that the trainer has (0: none yet): the one that follows is delivered
        again if it was made already. Those up to `saved` (default: `after`) are deleted. `step` is the trainer's own
        count, for trainers that may leave out a batch.
        """
        async with self._taking:
            if self.registration is None:
                return None
            if after is not None and after > self.last_batch > 0 and not self._is_back:
                raise SettingError(f"after={after}: the last batch that was made here is {self.last_batch}")
            if not self.started:
                await self._set(started=True)
            if after is not None:
                await self._delete(after if saved is None else saved)
                await self._note_death(after)
                if (number := next((n for n in self._unsaved if n > after), None)) is not None:
                    facts = {"held": number}
                    if step is not None or number > self.counted:  # made before the trainer was resumed
                        facts |= {"step": (self.step if step is None else step) + 1, "counted": number}
                    await self._set(**facts)
                    return Delivery(number, await self.journal.do(lambda db: journal.batch_bodies(db, number)))
            delivery = await self._make(after, step)
            if delivery is None and self.held:
                await self._set(held=0)
            return delivery

    async def _note_death(self, after: int) -> None:
        """Count a trainer that came back without the batch that it had; the third time, the batch is set aside."""
        is_back, self._is_back = self._is_back, False
        if not (is_back and self.held > after and self.held in self._unsaved):
            return
        batch, deaths = self.suspect
        await self._set(suspect=(self.held, deaths + 1 if batch == self.held else 1))
        if self.suspect[1] >= _MAX_DEATHS:
            path = self.folder / f"set-aside-batch-{self.held}.jsonl"
            await self.journal.do(lambda db: journal.set_aside(db, self.held, path))
            self._unsaved.remove(self.held)
            log.warning("batch %d is set aside in %s: the trainer ended on it %d times", self.held, path, _MAX_DEATHS)

    async def _delete(self, up_to: int) -> None:
        if any(number <= up_to for number in self._unsaved):
            await self.journal.do(lambda db: journal.delete_batches(db, up_to))
            self._unsaved = [number for number in self._unsaved if number > up_to]

    async def _make(self, after: int | None, step: int | None) -> Delivery | None:
        assert self.registration is not None
        minimums = {e.id: e.min_batch_allocation for e in self.envs if e.connected and e.min_batch_allocation}
        batch = next_batch(self.waiting, self.registration.batch_size, minimums)
        if batch is None:
            return None
        number, step = max(self.last_batch, after or 0) + 1, (self.step if step is None else step) + 1
        ids = {group.id for group in batch}
        bodies = await self.journal.do(lambda db: journal.make_batch(db, number, sorted(ids), step))
        self.waiting = [group for group in self.waiting if group.id not in ids]
        self.waiting_sequences -= self.registration.batch_size
        self.waiting_bytes -= sum(group.size for group in batch)
        self.last_batch, self.step, self.counted, self.held = number, step, number, number
        self._unsaved.append(number)
        if after is None:  # a trainer of the original protocol has what was delivered before
            await self._delete(number - 1)
        return Delivery(number, bodies)

    def why_no_batch(self) -> str | None:
        """The reason that the waiting groups make no batch; None where more groups may change that."""
        batch_size = self.registration.batch_size if self.registration else 0
        if not batch_size or self.waiting_sequences < batch_size:
            return None
        sizes = sorted({group.sequences for group in self.waiting})
        if batch_size % math.gcd(*sizes, *(env.group_size for env in self.envs if env.connected)):
            return (
                f"{self.waiting_sequences} sequences wait in groups of {', '.join(map(str, sizes))}, which never add "
                f"up to a batch of {batch_size}; make the batch a multiple of the groups' size "
                "(train.problems_per_step x rollout.group_size)"
            )
        largest = self.max_waiting - self.waiting_sequences, self.max_bytes - self.waiting_bytes
        if largest[0] < max(sizes) or largest[1] < max(group.size for group in self.waiting):
            return (
                f"the queue is full, and holds no batch of {batch_size}: groups of {', '.join(map(str, sizes))} wait; "
                "look at the environments' min_batch_allocation, or raise --max-waiting"
            )
        return None

    def env_status(self, env_id: int) -> dict[str, Any]:
        """Status by which an environment adjusts its workers. Sizes are in groups of its own size."""
        env = self.env(env_id)
        counts = Counter[int | None]()
        for group in self.waiting:
            counts[group.env_id] += group.sequences
        group_size = max(env.group_size, *(g.sequences for g in self.waiting if g.env_id == env_id), 0)
        largest = max((g.sequences for g in self.waiting), default=1)
        connected = [e for e in self.envs if e.connected]
        batch_size = self.registration.batch_size if self.registration else 0
        minimums = {e.id: int(batch_size * (e.min_batch_allocation or 0.0)) for e in connected}
        # sequences of other environments beyond what their own minimum will take
        free = sum(max(0, n - (0 if e is None else minimums.get(e, 0))) for e, n in counts.items() if e != env_id)
        total = sum(e.max_token_length * max(0.0, e.weight) for e in connected)
        share = env.max_token_length * env.weight / total if total > 0 else 1.0
        return {
            "current_step": self.step,
            "num_steps": self.registration.num_steps if self.registration else 0,
            "queue_size": (counts[env_id] + free) // group_size,
            "unallocated_fraction": 1.0 - min(sum(e.min_batch_allocation or 0.0 for e in connected), 1.0),
            "self_queue_size": counts[env_id] // group_size,
            "max_group_size": largest,
            "env_weight": max(_MIN_WEIGHT, share),
        }

    async def reset(self) -> None:
        async with self._taking:
            await self.journal.do(journal.clear)
            self._load()


def next_batch(
    queue: Sequence[Queued], batch_size: int, minimums: Mapping[int, float] | None = None
) -> list[Queued] | None:
    """The groups of the next batch in the order in which they came; None when no exact batch can be made yet.

    `minimums` gives environments a share of each batch (0 to 1) that is theirs. Where taking the oldest
    groups would leave one of them with less, each of them gets the smallest amount that covers its share,
    and the others fill the rest.
    """
    oldest = _oldest_exactly(queue, batch_size)
    # shares of more than the whole batch are scaled down together
    scale = 1.0 / max(1.0, sum((minimums or {}).values()))
    counts = {env_id: int(batch_size * share * scale + 1e-9) for env_id, share in (minimums or {}).items()}
    required = {env_id: count for env_id, count in counts.items() if count}
    present = Counter[int | None]()
    for group in oldest or ():
        present[group.env_id] += group.sequences
    if oldest is None or all(present[env_id] >= least for env_id, least in required.items()):
        return oldest
    pools = [[g for g in queue if g.env_id == env_id] for env_id in required]
    pools.append([g for g in queue if g.env_id not in required])
    reachable = []
    for pool, least in zip(pools, [*required.values(), 0], strict=True):
        sums = 1
        for group in pool:
            sums |= (sums << group.sequences) & ((1 << (batch_size + 1)) - 1)
        reachable.append([amount for amount in range(least, sums.bit_length()) if sums >> amount & 1])
    amounts = _choose(reachable, batch_size)
    if amounts is None:
        return None
    parts = [_oldest_exactly(pool, amount) for pool, amount in zip(pools, amounts, strict=True)]
    return sorted((group for part in parts for group in part or []), key=lambda group: group.id)


def _oldest_exactly(queue: Sequence[Queued], total: int) -> list[Queued] | None:
    """The oldest groups that add up to `total`: out of the shortest run that can, each one that can be in is in."""
    sums, everything = 1, (1 << (total + 1)) - 1  # bit s of `sums`: the sum s can be reached
    for end, group in enumerate([None, *queue]):
        sums |= (sums << group.sequences) & everything if group else 0
        if sums >> total & 1:
            amounts = _choose([(g.sequences, 0) for g in queue[:end]], total)
            return [g for g, amount in zip(queue, amounts or (), strict=False) if amount]
    return None


def _choose(options: Sequence[Sequence[int]], total: int) -> list[int] | None:
    """One amount out of each of `options`, together `total`; each gets the first of its amounts that works."""
    behind = [1]  # bit s of an entry: the options from there on can add up to s
    for amounts in reversed(options):
        sums = 0
        for amount in amounts:
            sums |= behind[-1] << amount
        behind.append(sums & ((1 << (total + 1)) - 1))
    behind.reverse()
    if not behind[0] >> total & 1:
        return None
    chosen = []
    for amounts, rest in zip(options, behind[1:], strict=True):
        chosen.append(next(a for a in amounts if a <= total and rest >> (total - a) & 1))
        total -= chosen[-1]
    return chosen
