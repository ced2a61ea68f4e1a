"""The loop with a fake learner and policy: what is called when, what is kept, and what happens when it goes wrong."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from loop_fakes import PROBLEMS, FakeCollector, attempt, make_loop

from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.types import Group, Problem, Rollout, Score, Turn
from palestra.train import loop as loop_module
from palestra.train.checkpoint import read_checkpoint, step_checkpoints, step_folder
from palestra.train.group_source import ProblemSource, StepRollouts, draw
from palestra.train.loop import Interrupted
from palestra.train.schedule import learning_rate_at, total_steps
from palestra.train.watcher import Watcher

Play = Callable[[int, str], Sequence[Rollout]]


def equal(number: int, problem: str) -> list[Rollout]:
    """Siblings that are told apart by nothing."""
    return [attempt(problem, 1.0) for _ in range(2)]


def differ(number: int, problem: str) -> list[Rollout]:
    return [attempt(problem, reward) for reward in (0.0, 1.0)]


def only(*numbers: int) -> Play:
    """Signal in the groups of these draws alone."""
    return lambda number, problem: (differ if number in numbers else equal)(number, problem)


def test_a_step_gathers_learns_and_then_gives_the_policy_the_next_version() -> None:
    loop = make_loop(steps=2)
    loop.training.run()
    step = ["collect 2", "forward_backward", "optim_step"]
    assert loop.calls == [*step, "update 1", *step, "update 2"]
    assert loop.policy.weight == loop.learner.weight == 2
    assert (loop.training.state.step, loop.training.state.policy_version) == (2, 2)
    assert [step for step, _ in loop.tracker.rows] == [1, 2]
    assert loop.tracker.groups == [(1, 2), (2, 2)]
    assert loop.tracker.rows[0][1]["loss"] == 0.5


@dataclass
class AheadCollector(FakeCollector):
    """Says what it prepares."""

    async def prepare(self, problems: Sequence[Problem], group_size: int) -> None:
        self.calls.append(f"prepare {', '.join(problem.id for problem in problems)}")

    def abandon(self) -> None:
        self.calls.append("abandon")


def test_records_and_the_next_steps_episodes_are_made_ready_while_the_learner_works() -> None:
    loop = make_loop({"eval.every": 3}, steps=5)
    source = loop.training.source
    assert isinstance(source, ProblemSource)
    source.collector = collector = AheadCollector(loop.calls, loop.policy)
    loop.tracker.rollouts = lambda step, groups: loop.calls.append(f"records {step}")  # type: ignore[method-assign]
    loop.training.run(evaluate=lambda step: loop.calls.append("evaluate") or 0.0)
    ids = [problem.id for problem in draw(PROBLEMS, 0, 10, seed=loop.training.config.seed)]
    learns = ["forward_backward", "optim_step"]
    expected = []
    for step in range(1, 6):
        # the last step has no next one, and before the fourth an evaluation may need the room
        ahead = [] if step in (3, 5) else [f"prepare {ids[2 * step]}, {ids[2 * step + 1]}"]
        expected += ["collect 2", *learns, *ahead, f"records {step}", f"update {step}"]
        expected += ["evaluate"] if step == 3 else []
    assert loop.calls == expected
    assert collector.keys[-2:] == ["0/8", "0/9"]


def test_a_step_without_signal_is_recorded_and_the_next_one_prepared_all_the_same() -> None:
    loop = make_loop({"train.refill_limit": 0}, steps=2)
    source = loop.training.source
    assert isinstance(source, ProblemSource)
    source.collector = AheadCollector(loop.calls, loop.policy, play=equal)
    loop.training.run()
    assert [call.split()[0] for call in loop.calls] == ["collect", "prepare", "collect"]
    assert loop.tracker.groups == [(1, 2), (2, 2)]
    assert loop.tracker.rows[0][1]["groups"] == 2.0


def test_the_seed_of_a_group_is_the_runs_seed_and_the_number_of_its_draw() -> None:
    loop = make_loop({"seed": 7}, steps=2)
    loop.training.run()
    assert loop.collector.keys == ["7/0", "7/1", "7/2", "7/3"]


def test_a_step_without_signal_moves_the_schedules_on_and_publishes_nothing() -> None:
    layer = {"train.scheduler": "linear", "train.refill_limit": 0, "echo.coefficient": 1.0, "echo.schedule": "linear"}
    loop = make_loop(layer, steps=4, play=only(0, 1, 4, 5, 6, 7))  # nothing in the second step
    loop.training.run()
    updates = [call for call in loop.calls if call.startswith("update")]
    assert updates == ["update 1", "update 2", "update 3"]
    train = loop.training.config.train
    assert loop.learner.rates == [learning_rate_at(step, train, 4) for step in (0, 2, 3)]
    assert [loss.echo_coefficient for loss in loop.learner.losses] == pytest.approx([1.0, 1 / 3, 0.0])
    assert "loss" not in loop.tracker.rows[1][1]
    assert loop.tracker.rows[1][1]["equal_reward_groups"] == 1.0
    assert (loop.training.state.step, loop.training.state.policy_version) == (4, 3)


@pytest.mark.parametrize(("coefficient", "steps_learned"), [(0.0, 0), (0.5, 2)])
def test_echo_learns_from_tool_results_where_all_rewards_are_equal(coefficient: float, steps_learned: int) -> None:
    def play(number: int, problem: str) -> list[Rollout]:
        one, other = equal(number, problem)
        return [replace(r, turns=(*r.turns, Turn("environment", (6, 7)))) for r in (one, other)]  # type: ignore[arg-type]

    loop = make_loop({"echo.coefficient": coefficient, "train.refill_limit": 0}, steps=2, play=play)
    loop.training.run()
    assert [(loss.policy_tokens, loss.echo_tokens) for loss in loop.learner.losses] == [(0, 8)] * steps_learned
    assert loop.training.state.policy_version == steps_learned


@pytest.mark.parametrize(
    ("layer", "play", "collected"),
    [
        ({"train.refill_limit": 2}, only(), [2, 4]),
        ({"train.refill_limit": 1}, only(), [2, 2]),
        ({"train.refill_limit": 1, "train.signal_share": 1}, only(0, 3), [2, 2]),
        ({}, only(1, 2), [2]),
        ({"train.refill_limit": 0}, only(), [2]),
        ({"train.filter_equal_groups": False}, only(), [2]),
    ],
    ids=["none found", "limit met", "all must have signal", "one is enough", "off", "no filter"],
)
def test_refilling_draws_fresh_problems_up_to_the_limit(
    layer: Mapping[str, Any], play: Play, collected: list[int]
) -> None:
    loop = make_loop(layer, steps=1, play=play)
    loop.training.run()
    assert [call for call in loop.calls if call.startswith("collect")] == [f"collect {n}" for n in collected]
    drawn = sum(collected)
    assert loop.collector.keys == [f"0/{i}" for i in range(drawn)]  # never the same twice
    assert loop.training.state.source == {"cursor": drawn}
    assert loop.tracker.groups == [(1, drawn)]


def test_extra_sampling_is_explained_once() -> None:
    loop = make_loop({"train.refill_limit": 2}, steps=3, play=only(0, 1))
    loop.training.watcher = heard = Hears()
    loop.training.run()
    assert ["train.signal_share" in note for note in heard.notes] == [True]
    assert heard.notes[0].startswith("step 2 sampled 6 groups instead of 2")


def test_a_source_that_cannot_be_refilled_is_asked_once() -> None:
    loop = make_loop(steps=1, play=equal)
    loop.training.source.refills = False  # type: ignore[misc]
    loop.training.run()
    assert loop.calls == ["collect 2"]


def test_a_problem_that_fails_alone_in_a_refill_does_not_end_the_run() -> None:
    def play(number: int, problem: str) -> list[Rollout]:
        if number == 2:  # the one that takes the place of number 1
            return [attempt(problem, 0.0, error="it does not start")] * 2
        return only(0, 3)(number, problem)  # type: ignore[return-value]

    loop = make_loop({"train.signal_share": 1}, steps=1, play=play)
    loop.training.run()
    [(_, metrics)] = loop.tracker.rows
    assert metrics["rollout_failures"] == 2
    assert metrics["loss"] == 0.5


def test_a_step_in_which_every_attempt_fails_ends_the_run_with_the_first_error() -> None:
    loop = make_loop(play=lambda number, problem: [attempt(problem, 0.0, error=f"number {number} is broken")] * 2)
    with pytest.raises(PalestraError, match="step 1: every rollout failed; the first error was number 0 is broken"):
        loop.training.run()


def test_a_step_in_which_every_attempt_failed_draws_other_problems_before_the_run_ends() -> None:
    def play(number: int, problem: str) -> list[Rollout]:
        return [attempt(problem, 0.0, error="the judge is away")] * 2 if number < 4 else differ(number, problem)

    loop = make_loop({"train.refill_limit": 0}, steps=1, play=play)
    loop.training.run()
    [(_, metrics)] = loop.tracker.rows
    assert (metrics["rollouts"], metrics["rollout_failures"], metrics["loss"]) == (12, 8, 0.5)


def test_a_step_of_measures_that_sum_equally_is_not_refilled_if_each_is_normalised_first() -> None:
    def play(number: int, problem: str) -> list[Rollout]:
        return [
            replace(
                attempt(problem, 1.0),
                scores={"a": Score(1.0 - x - y, False), "b": Score(x, False), "c": Score(y, False)},
            )
            for x, y in ((0.0, 0.0), (0.5, 0.5))
        ]

    for combine, drawn in (("sum_then_normalise", 6), ("normalise_then_sum", 2)):
        loop = make_loop({"train.combine": combine}, steps=1, play=play)
        loop.training.run()
        assert len(loop.collector.keys) == drawn
        assert loop.tracker.rows[0][1]["equal_reward_groups"] == (drawn == 6)


def test_a_measure_that_failed_is_counted_and_not_in_the_means() -> None:
    failed = {"right": Score(0.0, False, "measure right took longer than 60 s", error=True)}

    def play(number: int, problem: str) -> list[Rollout]:
        return [*differ(number, problem), replace(attempt(problem, 0.0), scores=failed, error="measure right failed")]

    loop = make_loop(steps=1, play=play)
    loop.training.run()
    [(_, metrics)] = loop.tracker.rows
    assert (metrics["measure_errors"], metrics["pass_rate/right"], metrics["reward_mean"]) == (2, 0.5, 0.5)


def test_different_score_names_in_one_step_are_reported_each_on_its_own() -> None:
    def play(number: int, problem: str) -> list[Rollout]:
        return [attempt(problem, reward, name="ab"[number % 2]) for reward in (0.0, 1.0)]

    for combine in ("sum_then_normalise", "normalise_then_sum"):
        loop = make_loop({"train.combine": combine}, steps=1, play=play)
        loop.training.run()
        [(_, metrics)] = loop.tracker.rows
        assert metrics["pass_rate/a"] == metrics["pass_rate/b"] == 0.5
        assert metrics["loss"] == 0.5


@dataclass
class OldGroups:
    """A source that gives groups of chosen versions, as a queue between two processes would."""

    versions: Iterator[int]
    max_staleness: int | None
    refills: bool = True
    gives_back: bool = False
    given: int = 0

    @property
    def reward_weights(self) -> Mapping[str, float]:
        return {}

    async def next(self, count: int, version: int) -> list[Group]:
        self.given += count
        ages = [next(self.versions) for _ in range(count)]
        return [Group("p", tuple(attempt("p", r, version=version + age) for r in (0.0, 1.0))) for age in ages]

    def state(self) -> dict[str, Any]:
        return {"given": self.given}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.given = state.get("given", 0)

    def observe(self, groups: Any, advantages: Any, step: int) -> None: ...

    def commit(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("limit", "ages", "given", "dropped", "oldest"),
    [
        (0, [0, -1, 0], 3, 1, 0),
        (1, [-2, -3, -1, 0], 4, 2, 1),
        (None, [-9, -1], 2, 0, 9),
    ],
)
def test_stale_groups_are_dropped_replaced_and_counted(
    limit: int | None, ages: list[int], given: int, dropped: int, oldest: int
) -> None:
    source = OldGroups(iter(ages), limit)
    loop = make_loop(steps=1, source=source)
    loop.training.run()
    [(_, metrics)] = loop.tracker.rows
    assert source.given == given
    assert metrics.get("stale_groups_dropped", 0) == dropped
    assert metrics["staleness_max"] == oldest
    assert metrics["rollouts"] == 4


def test_a_step_whose_groups_are_all_stale_trains_nothing_and_goes_on() -> None:
    loop = make_loop(steps=1, source=OldGroups(iter([-1] * 6), 0))
    loop.training.run()
    assert loop.calls == []
    assert loop.tracker.rows[0][1]["stale_groups_dropped"] == 6
    assert loop.training.state.step == 1


@pytest.mark.parametrize(("every", "expected"), [(0, []), (1, [1, 2, 3, 4, 5]), (2, [2, 4]), (4, [4]), (6, [])])
def test_evaluations_come_at_every_so_many_steps_but_not_at_the_last(every: int, expected: list[int]) -> None:
    loop, seen = make_loop({"eval.every": every}, steps=6), []

    def evaluate(step: int) -> float:
        seen.append((step, len(loop.tracker.rows)))
        return 0.0

    loop.training.run(evaluate)
    assert seen == [(step, step) for step in expected]


def test_the_watcher_hears_of_every_step_and_of_training_going_on_after_an_evaluation() -> None:
    class Heard(Watcher):
        words: list[str] = []  # noqa: RUF012

        def phase(self, name: str, total: int) -> None:
            self.words.append(f"{name} {total}")

        def advance(self, done: int, metrics: dict[str, float]) -> None:
            self.words.append(f"{done} {metrics['loss']}")

    loop = make_loop({"eval.every": 2}, steps=3)
    loop.training.watcher = Heard()
    loop.training.run(lambda step: 0.0)
    assert Heard.words == ["training 3", "1 0.5", "2 0.5", "training 3", "3 0.5"]


def names(checkpoints: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in step_checkpoints(checkpoints)]


def passing(*steps: int) -> Play:
    """Two groups a step: both siblings pass one of them in these steps, so that the mean reward is higher."""

    def play(number: int, problem: str) -> list[Rollout]:
        better = number % 2 and number // 2 + 1 in steps
        return [attempt(problem, reward) for reward in ((1.0, 1.0) if better else (0.0, 1.0))]

    return play


@pytest.mark.parametrize(
    ("layer", "kept"),
    [
        ({"checkpoint.keep_last": 2}, [3, 5, 6]),
        ({"checkpoint.keep_last": 1, "checkpoint.keep_best": False}, [6]),
        ({"checkpoint.keep_last": 3, "checkpoint.keep_best": False}, [4, 5, 6]),
        ({"checkpoint.every": 4}, [4, 6]),  # the last one always
        ({"checkpoint.every": 0}, []),
    ],
)
def test_the_newest_checkpoints_and_the_best_are_kept(
    layer: Mapping[str, Any], kept: list[int], tmp_path: Path
) -> None:
    every = {"checkpoint.every": 1, "train.refill_limit": 0}
    loop = make_loop(every, layer, steps=6, checkpoints=tmp_path, play=passing(3))
    loop.training.run()
    assert names(tmp_path) == kept


@pytest.mark.parametrize(
    ("layer", "kept"),
    [
        ({"checkpoint.every": 1}, [4, 6]),  # and not step 3, of the best training reward
        ({"checkpoint.every": 5}, [4, 6]),  # also where no checkpoint was due
        ({"checkpoint.every": 1, "checkpoint.keep_best": False}, [6]),
        ({"checkpoint.every": 0}, []),
    ],
)
def test_where_evaluations_happen_the_best_is_the_one_of_the_best_held_out_reward(
    layer: Mapping[str, Any], kept: list[int], tmp_path: Path
) -> None:
    base = {"checkpoint.keep_last": 1, "train.refill_limit": 0, "eval.every": 2}
    loop = make_loop(base, layer, steps=6, checkpoints=tmp_path, play=passing(3))
    loop.training.run({2: 0.1, 4: 0.9}.__getitem__)
    assert names(tmp_path) == kept
    if 4 in kept:
        assert read_checkpoint(step_folder(tmp_path, 4)).best_reward == 0.9


@pytest.mark.parametrize(("every", "steps"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5])])
def test_the_log_has_a_line_every_so_many_steps_and_at_the_last(
    every: int, steps: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="palestra"):
        make_loop({"track.log_every": every}, steps=5).training.run()
    assert caplog.messages == [f"step {step} of 5: loss 0.5, reward_mean 0.5, pass_rate 0.5" for step in steps]


def test_a_resumed_loop_goes_on_where_the_checkpoint_was_written(tmp_path: Path) -> None:
    layer = {"checkpoint.every": 1, "train.target_entropy": 2.0, "train.refill_limit": 1}
    play = only(*range(0, 40, 2))
    straight = make_loop(layer, steps=4, play=play)
    straight.training.run()

    first = make_loop(layer, steps=2, checkpoints=tmp_path, play=play)
    first.training.run()
    second = make_loop(layer, steps=4, checkpoints=tmp_path, play=play)
    folder = step_folder(tmp_path, 2)
    second.training.resume(folder, read_checkpoint(folder))
    assert second.calls == ["update 2"]  # the policy samples from the weights of the checkpoint
    assert second.policy.weight == second.learner.weight == 2
    assert second.training.entropy_coefficient == pytest.approx(0.01)
    second.training.run()
    assert first.collector.keys + second.collector.keys == straight.collector.keys
    one, other = second.training.state, straight.training.state
    assert (one.step, one.source, one.policy_version) == (other.step, other.source, other.policy_version)
    assert one.entropy_coefficient == other.entropy_coefficient == pytest.approx(0.02)
    assert second.learner.weight == straight.learner.weight == 4


@pytest.fixture(autouse=True)
def sigint_is_ctrl_c() -> Iterator[None]:
    """A background job of a script ignores SIGINT; here it means what it means in a terminal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_at(number: int) -> Play:
    def play(drawn: int, problem: str) -> list[Rollout]:
        if drawn == number:
            signal.raise_signal(signal.SIGINT)
        return differ(drawn, problem)

    return play


def test_ctrl_c_while_sampling_saves_the_last_whole_step(tmp_path: Path) -> None:
    loop = make_loop(checkpoints=tmp_path, play=interrupt_at(5))  # in the third step
    with pytest.raises(Interrupted) as raised:
        loop.training.run()
    assert raised.value.checkpoint == step_folder(tmp_path, 2)
    state = read_checkpoint(raised.value.checkpoint)
    assert (state.step, state.source, state.policy_version) == (2, {"cursor": 4}, 2)
    assert (raised.value.checkpoint / "weight").read_text() == "2"


def test_ctrl_c_while_learning_waits_for_the_end_of_the_step(tmp_path: Path) -> None:
    loop = make_loop(checkpoints=tmp_path)
    loop.learner.on_step = lambda weight: signal.raise_signal(signal.SIGINT) if weight == 1 else None
    with pytest.raises(Interrupted) as raised:
        loop.training.run()
    assert raised.value.checkpoint == step_folder(tmp_path, 2)
    assert read_checkpoint(raised.value.checkpoint).source == {"cursor": 4}
    assert [step for step, _ in loop.tracker.rows] == [1, 2]
    assert loop.calls[-1] == "update 2"


def test_ctrl_c_without_checkpoints_is_a_plain_one() -> None:
    with pytest.raises(KeyboardInterrupt) as raised:
        make_loop(play=interrupt_at(1)).training.run()
    assert not isinstance(raised.value, Interrupted)


def failing_at(step: int, error: Exception) -> Callable[[int], None]:
    def fail(weight: int) -> None:
        if weight == step - 1:
            raise error

    return fail


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("cuBLAS failed"), "RuntimeError: cuBLAS failed"),
        (PalestraError("group 3: the loss is nan"), "group 3: the loss is nan"),
        (KeyError("sampled_tokens"), "KeyError: 'sampled_tokens'"),
    ],
)
def test_any_other_error_names_the_step_and_the_last_good_checkpoint(
    error: Exception, words: str, tmp_path: Path
) -> None:
    loop = make_loop({"checkpoint.every": 2}, checkpoints=tmp_path)
    loop.learner.on_step = failing_at(4, error)
    with pytest.raises(PalestraError) as raised:
        loop.training.run()
    assert str(raised.value) == f"step 4: {words}. The last good checkpoint is {step_folder(tmp_path, 2)}"
    assert raised.value.__cause__ is error
    assert loop.training.state.step == 3  # what failed does not count
    assert names(tmp_path) == [2]


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory. Tried to allocate 2 GiB."), MemoryError()])
def test_without_memory_the_settings_to_change_are_named(error: Exception, tmp_path: Path) -> None:
    loop = make_loop({"checkpoint.every": 2, "model.sleep_mode": True}, checkpoints=tmp_path)
    loop.learner.on_step = failing_at(4, error)
    with pytest.raises(PalestraError) as raised:
        loop.training.run()
    text = str(raised.value)
    assert text.startswith(
        f"step 4: {type(error).__name__}: {str(error).rstrip('.')}. To need less memory, in this order: "
    )
    assert "a lower train.tokens_per_micro_batch (now 16384 or more, by the model), model.gradient_checkp" in text
    assert text.endswith(f"(now 8). The last good checkpoint is {step_folder(tmp_path, 2)}")


def test_a_last_checkpoint_that_cannot_be_saved_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_loop({"checkpoint.every": 3}, checkpoints=tmp_path)

    def full(folder: Path) -> None:
        if loop.training.state.step == 4:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(loop.learner, "save", full)
    with pytest.raises(
        PalestraError, match=r"saving the last checkpoint: .*No space left.*checkpoint is .*step-000003"
    ):
        loop.training.run()


def test_a_disk_that_is_full_while_records_are_written_is_told_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop({"checkpoint.every": 2}, checkpoints=tmp_path)

    def full(step: int, *rest: Any) -> None:
        if step == 4:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(loop.tracker, "rollouts", full)
    with pytest.raises(PalestraError, match=r"^step 4: .*No space left on device.*checkpoint is .*step-000002$"):
        loop.training.run()


class Hears(Watcher):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def test_what_keeps_a_run_from_learning_is_told_while_it_happens_and_once(tmp_path: Path) -> None:
    loop = make_loop({"train.refill_limit": 0}, steps=8, play=lambda n, problem: [attempt(problem, 0.0)] * 2)
    heard = loop.training.watcher = Hears()
    told_after: list[int] = []
    heard.advance = lambda done, metrics: told_after.append(len(heard.warnings))  # type: ignore[method-assign]
    loop.training.run()
    assert told_after == [0, 0, 0, 1, 1, 1, 1, 1]  # `advance` comes before the judgement of its step
    assert "in the last 3 steps every rollout earned a reward of 0, which teaches nothing" in heard.warnings[0]


def test_without_a_face_warnings_go_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    make_loop({"train.refill_limit": 0}, play=lambda n, problem: [attempt(problem, 0.0)] * 2).training.run()
    assert "every rollout earned a reward of 0" in caplog.text


@pytest.mark.parametrize(("count", "last"), [(0, 9), (2, 5), (3, 6), (20, 9)])
def test_a_run_ends_early_when_every_rollout_of_so_many_steps_passed(count: int, last: int, tmp_path: Path) -> None:
    layer = {"train.stop_when_solved": count, "train.refill_limit": 0}
    loop = make_loop(layer, steps=9, checkpoints=tmp_path, play=only(0, 4, 5))  # all pass in steps 2 and 4 to 9
    heard = loop.training.watcher = Hears()
    loop.training.run()
    assert loop.training.state.step == last
    assert names(tmp_path) == [last]
    early = f"every rollout of the last {count} steps passed, so the training ended after step {last} of 9 "
    assert [note.startswith(early) for note in heard.notes] == [True] * (last < 9)
    assert (loop.training.ended_early is not None) == (last < 9)


def test_a_run_ends_after_the_step_that_reaches_its_limit_of_sampled_tokens(tmp_path: Path) -> None:
    whole = make_loop(steps=4)
    whole.training.run()
    in_a_step = whole.training.state.sampled_tokens // 4
    loop = make_loop({"train.max_sampled_tokens": in_a_step + 1}, steps=4, checkpoints=tmp_path)
    loop.training.run()
    assert loop.training.state.step == 2
    assert loop.training.state.sampled_tokens == 2 * in_a_step > 0
    assert names(tmp_path) == [2]
    assert "train.max_sampled_tokens" in (loop.training.ended_early or "")


def test_an_error_in_the_first_step_says_that_there_is_no_checkpoint_yet(tmp_path: Path) -> None:
    loop = make_loop(checkpoints=tmp_path)
    loop.learner.on_step = failing_at(1, RuntimeError("no"))
    with pytest.raises(PalestraError, match=r"step 1: RuntimeError: no\. No checkpoint had been written yet"):
        loop.training.run()


def test_in_sleep_mode_the_policy_sleeps_while_the_learner_works() -> None:
    loop = make_loop({"model.sleep_mode": True}, steps=1)
    loop.training.run()
    assert loop.calls == ["collect 2", "sleep", "forward_backward", "optim_step", "wake", "update 1"]


def test_a_policy_is_woken_when_the_learner_fails() -> None:
    loop = make_loop({"model.sleep_mode": True}, steps=1)
    loop.learner.on_step = failing_at(1, PalestraError("the loss is nan"))
    with pytest.raises(PalestraError, match="the loss is nan"):
        loop.training.run()
    assert loop.calls[-1] == "wake"


def test_a_step_without_signal_wakes_nobody() -> None:
    loop = make_loop({"model.sleep_mode": True, "train.refill_limit": 0}, steps=1, play=equal)
    loop.training.run()
    assert loop.calls == ["collect 2"]


def test_the_entropy_controller_moves_by_what_the_step_measured_and_rests_without_signal() -> None:
    layer = {"train.target_entropy": 2.0, "train.entropy_coefficient": 0.1, "train.refill_limit": 0}
    loop = make_loop(layer, steps=5, play=only(0, 1, 2, 3, 6, 7, 8, 9))  # nothing in the third step

    def measured(weight: int) -> None:
        loop.learner.entropy = 1.0 if weight < 2 else 3.0

    loop.learner.on_step = measured
    loop.training.run()
    used = [loss.entropy_coefficient for loss in loop.learner.losses]
    assert used == pytest.approx([0.1, 0.105, 0.11, 0.115])
    reported = [row.get("entropy_coefficient") for _, row in loop.tracker.rows]
    assert reported == [used[0], used[1], None, used[2], used[3]]
    assert loop.training.state.entropy_coefficient == pytest.approx(0.11)  # one down at last


def test_a_step_taken_by_hand_needs_no_total_and_no_folder() -> None:
    loop = make_loop(steps=None)
    assert loop.training.step()["loss"] == 0.5
    assert loop.training.state.step == 1
    with pytest.raises(PalestraError, match="no folder"):
        loop.training.checkpoint()


def test_total_steps_cover_all_epochs_unless_limited() -> None:
    config = RunConfig.build({"train": {"epochs": 3, "problems_per_step": 4}})
    assert total_steps(config, 10) == 9
    assert total_steps(RunConfig.build({"train": {"max_steps": 5}}), 10) == 5
    unsaid = RunConfig.build({"train.problems_per_step": 4})
    assert (total_steps(unsaid, 90), total_steps(unsaid, 400)) == (40, 100)
    with pytest.raises(PalestraError, match=r"say when to stop with train\.max_steps"):
        total_steps(config, None)


def test_the_loop_draws_the_shuffled_stream_of_its_problems() -> None:
    seen: list[str] = []

    def play(number: int, problem: str) -> list[Rollout]:
        seen.append(problem)
        return differ(number, problem)

    loop = make_loop({"seed": 3}, steps=6, play=play)
    loop.training.run()
    assert seen == [p.id for p in draw(PROBLEMS, 0, 12, seed=3)]


def test_a_nan_reward_stops_the_run_and_names_where(tmp_path: Path) -> None:
    """As a source in another process may post it; measures and reward functions are checked where they are called."""
    loop = make_loop(
        {"checkpoint.every": 1},
        checkpoints=tmp_path,
        play=lambda number, problem: [attempt(problem, r) for r in (float("nan") if number == 4 else 0.0, 1.0)],
    )
    with pytest.raises(PalestraError) as raised:  # two groups a step: the fifth is in step 3
        loop.training.run()
    text = str(raised.value)
    assert text.startswith("step 3: the reward of rollout 0 in the group of problem")
    assert "is nan" in text
    assert f"The last good checkpoint is {tmp_path / 'step-000002'}" in text


def test_the_time_of_a_phase_is_that_while_sampling_and_that_while_learning() -> None:
    loop = make_loop(steps=1)
    sampled = StepRollouts([Group("p", tuple(differ(0, "p")))], [[-1.0, 1.0]], 0, 1.0)
    metrics = loop.training.learn(sampled, {"learner": 100.0, "decode": 2.0})  # a phase of the step's second half, too
    assert metrics["learner_seconds"] > 100.0
    assert metrics["decode_seconds"] == 2.0


def test_a_checkpoint_that_leaves_no_room_for_the_final_model_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop({"checkpoint.every": 1, "checkpoint.keep_last": 9}, checkpoints=tmp_path)
    heard = loop.training.watcher = Hears()
    loop.training.checkpoint_bytes, loop.training.model_bytes = 300, 100
    free = {1: 400, 2: 399, 3: 1000, 4: 0}
    monkeypatch.setattr(loop_module, "free_bytes", lambda path: free[loop.training.state.step])
    saved: list[int] = []
    loop.training.save_model = lambda: saved.append(loop.training.state.step)
    loop.training.run()
    assert names(tmp_path) == [1, 3]
    assert [text.split(":")[0] for text in heard.warnings[:2]] == ["no checkpoint of step 2", "no checkpoint of step 4"]
    assert saved == [4]


def test_the_final_model_is_saved_before_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_loop({"checkpoint.every": 2}, checkpoints=tmp_path)
    order: list[str] = []
    save = loop.learner.save

    def noting(folder: Path) -> None:
        order.append(f"checkpoint {loop.training.state.step}")
        save(folder)

    monkeypatch.setattr(loop.learner, "save", noting)
    loop.training.save_model = lambda: order.append("model")
    loop.training.run()
    assert order == ["checkpoint 2", "model", "checkpoint 4"]
