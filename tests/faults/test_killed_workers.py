"""Rollout workers that are killed at any moment: their groups are collected again, and the step is complete."""

import asyncio
import mmap
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from worker_runs import SIZE, Sums, WorkerRun, is_alive, pids, tokens

from palestra.core.channel import Channel
from palestra.core.errors import ResourceError
from palestra.core.types import Group, Problem, Rollout
from palestra.envs.running import RunningEnv
from palestra.policy.channel import FAMILY
from palestra.rollout.workers import NUMBERS_OF_A_JOB, RolloutWorkers

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="rollout.workers forks processes")

WORKERS, GROUPS, VICTIM = 3, 6, 1
IN_THE_WORKER = ["opening", "tool", "scoring", "sending a group", "prepare"]
BY_THE_TRAINER = ["before its first message", "first turn", "second turn", "between two groups", "idle"]


class Orders:
    """Shared with the workers: the moment at which processes kill themselves, and which ones."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 4096)

    def give(self, moment: str, *pids: int) -> None:
        self._memory[:] = f"{moment}:{' '.join(map(str, pids))}".encode().ljust(4096)

    def is_for(self, moment: str, pid: int) -> bool:
        ordered, _, pids = self._memory[:].decode().strip().partition(":")
        return ordered == moment and str(pid) in pids.split()

    def reached(self, moment: str) -> None:
        """Called where the moment is reached, in any process."""
        if self.is_for(moment, os.getpid()):
            os.kill(os.getpid(), signal.SIGKILL)


ORDERS, FORKED = Orders(), mmap.mmap(-1, 4096)


class Deadly(Sums):
    def start(self) -> None:
        ORDERS.reached("opening")
        ORDERS.reached("prepare")

    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        ORDERS.reached("tool")
        if ORDERS.is_for("tool that has forked", os.getpid()):
            if (child := os.fork()) == 0:
                time.sleep(20)
                os._exit(0)
            os.setpgid(child, child)  # so that it does not end with the worker
            FORKED[:4] = child.to_bytes(4, "big")
            ORDERS.reached("tool that has forked")
        return a + b

    def score(self, answer: str) -> Any:
        ORDERS.reached("scoring")
        return super().score(answer)


class HalfSending(Channel):
    """Sends a half of the message with a group."""

    def _write(self) -> None:
        if ORDERS.is_for("sending a group", os.getpid()) and b"group" in self._unsent:
            self._socket.send(self._unsent[: len(self._unsent) // 2])
            ORDERS.reached("sending a group")
        super()._write()


@pytest.fixture(scope="module")
def expected(_loaded_tiny: Any) -> list[Any]:
    """The tokens of two steps in one process."""
    run = WorkerRun(RunningEnv(Sums()), _loaded_tiny, rollout__workers=0)
    steps = [tokens(run.step(GROUPS)) for _ in range(2)]
    run.close()
    run.parts.runner.close()
    return steps


@pytest.fixture
def run(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerRun]:
    monkeypatch.setattr("palestra.policy.workers.Channel", HalfSending)
    ORDERS.give("never")
    with_workers = WorkerRun(RunningEnv(Deadly()), tiny, rollout__workers=WORKERS)
    yield with_workers
    with_workers.close()
    with_workers.parts.runner.close()


def kill_at_turn(run: WorkerRun, turn: int) -> None:
    """Kill the victim when it begins this turn of a session."""
    begin, turns = run.policy.begin, Counter[int]()

    def begin_and_kill(session: Any, params: Any) -> Any:
        if session.number % NUMBERS_OF_A_JOB // FAMILY % WORKERS == VICTIM:
            turns[session.number] += 1
            if turns[session.number] == turn and is_alive(pid := run.pids[VICTIM]):
                os.kill(pid, signal.SIGKILL)
        return begin(session, params)

    run.policy.begin = begin_and_kill  # type: ignore[method-assign]


def kill_after_a_group(run: WorkerRun) -> None:
    workers = run.task.workers
    assert isinstance(workers, RolloutWorkers)
    add_group = workers._add_group

    def add_and_kill(worker: Any, job: int, number: int, group: Group, hung: int) -> None:
        add_group(worker, job, number, group, hung)
        if worker.process.pid == run.pids[VICTIM]:
            os.kill(run.pids[VICTIM], signal.SIGKILL)

    workers._add_group = add_and_kill  # type: ignore[method-assign]


@pytest.mark.parametrize("moment", [*IN_THE_WORKER, *BY_THE_TRAINER])
def test_groups_of_a_killed_worker_are_collected_again_by_the_others(run, expected, moment):
    victim = run.pids[VICTIM]
    if moment in IN_THE_WORKER and moment != "prepare":
        ORDERS.give(moment, victim)
    elif moment == "before its first message":
        os.kill(victim, signal.SIGKILL)
    elif "turn" in moment:
        kill_at_turn(run, 1 if moment == "first turn" else 2)
    elif moment == "between two groups":
        run.parts.config.rollout.max_open_episodes = SIZE * WORKERS
        kill_after_a_group(run)
    first = run.step(GROUPS)
    if moment == "idle":
        os.kill(victim, signal.SIGKILL)
    elif moment == "prepare":
        ORDERS.give(moment, victim)
    run.prepare(GROUPS)
    second = run.step(GROUPS)
    assert [tokens(first), tokens(second)] == expected
    assert [len(group.rollouts) for group in [*first, *second]] == [SIZE] * 2 * GROUPS
    assert all(len(processes) == 1 for processes in pids(first) + pids(second))
    assert {f"process {victim}"} not in pids(second)
    lost = [worker.lost is not None for worker in run.task.workers._workers]
    assert lost == [place == VICTIM for place in range(WORKERS)]
    assert not run.policy.engine.busy


def test_two_workers_that_are_killed_at_once_leave_their_groups_to_the_last(run, expected):
    ORDERS.give("scoring", *run.pids[:2])
    first = run.step(GROUPS)
    assert tokens(first) == expected[0]
    assert pids(first) == [{f"process {run.pids[2]}"}] * GROUPS


def test_the_step_ends_with_the_reason_when_the_last_worker_is_killed(run):
    ORDERS.give("scoring", *run.pids)
    with pytest.raises(ResourceError, match=r"SIGKILL.*rollout.workers"):
        run.step(GROUPS)
    assert not run.policy.engine.busy
    assert not any(map(is_alive, run.pids))


def test_a_process_that_a_tool_of_a_killed_worker_has_forked_holds_up_nothing(run, expected):
    """It would keep the worker's end of the connection open."""
    ORDERS.give("tool that has forked", run.pids[VICTIM])
    assert tokens(run.step(GROUPS)) == expected[0]
    assert run.task.workers._workers[VICTIM].lost is not None
    os.kill(int.from_bytes(FORKED[:4], "big"), signal.SIGKILL)  # it is still there


class Unsendable:
    """Collects groups of two attempts, the first with a part that cannot be sent."""

    async def collect(self, problems: Any, size: int, keys: Any, on_group: Any) -> None:
        for i, problem in enumerate(problems):
            info = {"handle": sys.__stdout__} if problem.id == "odd" else {}
            attempts = [Rollout(problem.id, (), (), "answered", info=more) for more in (info, {})]
            on_group(i, Group(problem.id, tuple(attempts)))


def test_a_record_that_cannot_be_sent_fails_its_attempt_alone():
    policy: Any = SimpleNamespace(version=0, expect=lambda turns: None)
    workers = RolloutWorkers(lambda policy: dict.fromkeys((True, False), Unsendable()), 1, 0)
    workers.start(policy)
    problems = [Problem(name, "") for name in ("even", "odd", "even")]
    with asyncio.Runner() as runner:
        for _ in range(2):
            step = workers.collect(True, problems, 2, ["0", "1", "2"], 1, lambda rollout: None)
            groups = runner.run(step)
            errors = [[rollout.error for rollout in group.rollouts] for group in groups]
            assert errors[0] == errors[2] == [None, None]
            assert errors[1][1] is None
            assert errors[1][0].startswith("rollout.info['handle'] is a TextIOWrapper, which cannot be sent")
        workers.close()
