"""Groups that are sampled ahead of their step: none too old, none lost, none twice, also after a kill."""

import asyncio
import json
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loop_fakes import PROBLEMS, FakeCollector, Loop, attempt, make_loop

from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError, SettingError, TrainingError
from palestra.core.group_codec import rollout_from_dict, rollout_to_dict
from palestra.core.types import Group, Message, Rollout, Score, ToolCall, ToolResult, Turn
from palestra.train import group_queue
from palestra.train.checkpoint import read_checkpoint
from palestra.train.group_queue import GroupQueue
from palestra.train.group_source import ProblemSource
from palestra.train.update import objective_of

Delay = Callable[[int], float]


class SlowCollector(FakeCollector):
    """Its groups take a while, each by its number; the problem's id tells the number."""

    delay: Delay
    finished: Callable[[int], None] = staticmethod(lambda number: None)  # type: ignore[assignment]
    running: int = 0
    most_running: int = 0

    async def collect(self, problems: Any, group_size: int, seed_keys: Sequence[str], on_rollout: Any = None) -> Any:
        number = int(seed_keys[0].rpartition("/")[2])
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            [group] = await super().collect(problems, group_size, seed_keys)
            await asyncio.sleep(self.delay(number))
            self.finished(number)
            return [Group(str(number), group.rollouts)]
        finally:
            self.running -= 1


@contextmanager
def queued(
    *layers: dict[str, Any],
    staleness: int,
    steps: int = 6,
    delay: Delay = lambda number: 0.0,
    folder: Path | None = None,
    concurrent: int = 1024,
    **fakes: Any,
) -> Iterator[Loop]:
    """A loop of fakes with a queue, as a process of its own has it: its end is a kill."""
    loop = make_loop({"rollout.max_staleness": staleness, "checkpoint.every": 2}, *layers, steps=steps, **fakes)
    collector = SlowCollector(loop.calls, loop.policy, loop.collector.play)
    collector.delay = delay
    loop.collector = collector
    training = loop.training
    trained: list[list[Group]] = []
    training.tracker.rollouts = lambda step, groups: trained.append(list(groups))  # type: ignore[method-assign]
    training.source = GroupQueue(
        ProblemSource(collector, PROBLEMS, {}, 2, 0, concurrent=concurrent),
        per_step=2,
        max_staleness=staleness,
        journal_file=None if folder is None else folder / "queue.sqlite",
        steps_left=lambda: training.steps_left,
    )
    training.checkpoints = None if folder is None else folder / "checkpoints"
    training.learner_thread = ThreadPoolExecutor(1)
    loop.tracker.groups = trained  # type: ignore[assignment]
    with training.runner:
        yield loop
        training.source.close()


def numbers(loop: Loop) -> list[list[int]]:
    """Of the groups, by the steps that they were trained in."""
    return [[int(group.problem_id) for group in groups] for groups in loop.tracker.groups]  # type: ignore[attr-defined]


def in_order(loop: Loop) -> list[int]:
    return [number for step in numbers(loop) for number in step]


def third_without_signal(number: int, problem: str) -> list[Rollout]:
    return [attempt(problem, reward) for reward in ((0.0, 1.0) if number % 3 else (1.0, 1.0))]


@pytest.mark.parametrize(
    ("staleness", "fakes"),
    [(1, {}), (2, {}), (5, {}), (2, {"play": third_without_signal})],
    ids=["1", "2", "5", "steps draw again for groups without signal"],
)
def test_no_group_is_older_than_the_limit_and_each_is_trained_once(staleness: int, fakes: dict[str, Any]) -> None:
    rng = random.Random(staleness)
    with queued(staleness=staleness, steps=12, delay=lambda n: rng.choice([0, 0, 0.002, 0.01]), **fakes) as loop:
        loop.training.run()
        assert in_order(loop) == list(range(len(in_order(loop))))
        assert len(in_order(loop)) == 24 or fakes
        oldest = max(row["staleness_max"] for row in loop.rows)
        assert oldest == staleness or (fakes and oldest < staleness)
        assert not any("stale_groups_dropped" in row for row in loop.rows)


def test_groups_are_sampled_while_the_learner_works() -> None:
    with queued(staleness=1, steps=2, delay=lambda number: 0.0 if number < 2 else 0.05) as loop:
        waited_for = threading.Event()
        loop.collector.finished = lambda number: waited_for.set() if number == 3 else None
        in_time: list[bool] = []
        loop.learner.on_step = lambda weight: in_time.append(waited_for.wait(5)) if weight == 0 else None
        loop.training.run()
    assert in_time == [True]


def test_a_last_step_samples_nothing_ahead() -> None:
    with queued(staleness=3, steps=4) as loop:
        loop.training.run()
        assert sorted(loop.collector.keys) == sorted(f"0/{i}" for i in range(8))


def test_no_more_groups_are_under_way_than_the_source_allows() -> None:
    with queued(staleness=4, steps=5, delay=lambda number: 0.002, concurrent=3) as loop:
        loop.training.run()
        assert loop.collector.most_running == 3
        assert in_order(loop) == list(range(10))


def test_waiting_that_is_cancelled_loses_no_group() -> None:
    with queued(staleness=1, delay=lambda number: 0.01) as loop:
        source, runner = loop.training.source, loop.training.runner
        with pytest.raises(TimeoutError):
            runner.run(asyncio.wait_for(source.next(2, 0), 0.001))
        groups = runner.run(asyncio.wait_for(source.next(2, 0), 5))
        assert [group.problem_id for group in groups] == ["0", "1"]
        assert loop.collector.keys.count("0/0") == 1


def test_a_group_that_fails_for_good_ends_the_step_with_its_error() -> None:
    def delay(number: int) -> float:
        if number == 5:
            raise PalestraError("the environment takes no more attempts")
        return 0.0

    with queued(staleness=2, delay=delay) as loop, pytest.raises(TrainingError, match="step 3: the environment takes"):
        loop.training.run()


class Killed(BaseException):
    """Nothing may handle it, as nothing handles SIGKILL."""


def die_at(weight: int) -> Callable[[int], None]:
    def on_step(current: int) -> None:
        if current == weight:
            raise Killed

    return on_step


def journal_of(loop: Loop) -> set[int]:
    """The numbers of the groups in the journal."""
    return loop.training.source._journal.read(lambda db: {n for (n,) in db.execute("SELECT number FROM draws")})  # type: ignore[attr-defined]


def content(steps: Sequence[Sequence[Group]]) -> list[Any]:
    return [[[rollout_to_dict(r, exact=True) for r in group.rollouts] for group in step] for step in steps]


@pytest.mark.parametrize("died_in", [1, 2, 3, 4, 5])
def test_a_killed_run_trains_the_same_groups_again_and_samples_only_what_was_under_way(died_in, tmp_path) -> None:
    rng = random.Random(died_in)
    slow = lambda number: rng.choice([0, 0.001, 0.005])  # noqa: E731
    with queued(staleness=2, delay=slow, folder=tmp_path) as first:
        first.learner.on_step = die_at(died_in - 1)
        with pytest.raises(Killed):
            first.training.run()
        done_before = journal_of(first)
    checkpoint = (died_in - 1) // 2 * 2
    with queued(staleness=2, delay=slow, folder=tmp_path) as second:
        if checkpoint:
            path = tmp_path / "checkpoints" / f"step-{checkpoint:06d}"
            second.training.resume(path, read_checkpoint(path))
        second.training.run()
        assert numbers(second) == [[2 * step, 2 * step + 1] for step in range(checkpoint, 6)]
        sampled_again = {int(key.rpartition("/")[2]) for key in second.collector.keys}
        assert sampled_again == set(range(2 * checkpoint, 12)) - done_before
        assert max(row["staleness_max"] for row in second.rows) <= 2
        again = slice(0, died_in - 1 - checkpoint)
        expected: Any = first.tracker.groups[checkpoint:]
        assert content(second.tracker.groups[again]) == content(expected)  # type: ignore[arg-type]


def test_going_back_to_an_older_checkpoint_forgets_the_groups_of_the_newer_one(tmp_path: Path) -> None:
    with queued(staleness=2, folder=tmp_path) as first:
        first.training.run()
        assert not journal_of(first), "it holds no group that a checkpoint holds"
    with queued(staleness=2, folder=tmp_path) as second:
        path = tmp_path / "checkpoints" / "step-000004"
        second.training.resume(path, read_checkpoint(path))
        second.training.run()
        assert numbers(second) == [[8, 9], [10, 11]]
        assert sorted(second.collector.keys) == ["0/10", "0/11", "0/8", "0/9"]


def test_a_state_of_the_queue_is_one_of_its_source_as_well() -> None:
    """So a run goes on without a queue where max_staleness was set back to 0."""
    with queued(staleness=2) as loop:
        loop.training.runner.run(loop.training.source.next(3, 0))
        source = ProblemSource(loop.collector, PROBLEMS, {}, 2, 0)
        source.restore(loop.training.source.state())
        assert source.drawn == 3


def test_an_exact_record_of_a_rollout_is_the_rollout_but_for_texts_that_are_in_its_messages() -> None:
    call = ToolCall("call_0", "look", {"x": 1}, error="not JSON")
    sampled = Turn("model", (3, 4), (-1 / 3, np.nan), (4, 5), "stop")  # type: ignore[arg-type]
    turns = (Turn("template", (1, 2)), sampled, Turn("environment", (9,)))  # type: ignore[arg-type]
    messages = (Message("user", "?"), Message("assistant", "", (call,)), Message("tool", "no", tool_call_id="call_0"))
    results = (ToolResult(ToolCall("call_0", "look"), "", ok=False, seconds=0.5, raised=True),)
    advantages, scores = np.asarray([0, 0, 1 / 3, 0.1, 0], np.float32), {"right": Score(0.5, None, "why")}
    rollout = Rollout(
        "p", turns, messages, "answered", results, scores, 0.5, advantages=advantages, tool_names=("look",)
    )
    again = rollout_from_dict(rollout_to_dict(rollout, exact=True))
    for name in ("turns", "messages", "tool_results", "scores", "reward", "stop", "tool_names", "error"):
        assert getattr(again, name) == getattr(rollout, name), name
    np.testing.assert_array_equal(again.advantages, advantages)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layer", "correction"),
    [
        ({}, "none"),
        ({"rollout.max_staleness": 1}, "token_truncate"),
        ({"rollout.max_staleness": 1, "train.importance_correction": "none"}, "none"),
        ({"train.importance_correction": "sequence_mask"}, "sequence_mask"),
    ],
)
def test_importance_correction_is_on_by_default_where_groups_may_be_stale(layer, correction) -> None:
    assert objective_of(RunConfig.build(layer)).importance_correction == correction


def test_sleeping_while_others_sample_is_refused() -> None:
    with pytest.raises(SettingError, match=r"model\.sleep_mode takes the sampler's memory.*choose one"):
        RunConfig.build({"model.sleep_mode": True, "rollout.max_staleness": 1})


def test_groups_in_a_journal_of_an_earlier_version_are_read() -> None:
    rollout = Rollout("p", (Turn("template", (1,)), Turn("model", (7, 8), (-0.5, -0.25), 3, "stop")), (), "answered")
    record = {"problem_id": "p", "metrics": {"x": 1.0}, "rollouts": [rollout_to_dict(rollout, exact=True)]}
    [group] = group_queue._groups(json.dumps([record]))
    assert (group.problem_id, group.metrics, group.rollouts[0].turns) == ("p", {"x": 1.0}, rollout.turns)
