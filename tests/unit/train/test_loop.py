"""The loop with a fake learner and policy: what is called when, what is kept, and what happens when it goes wrong."""

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from loop_fakes import PROBLEMS, FakeCollector, Loop, attempt, make_loop, ran

from palestra.core.errors import PalestraError, StateError, TrainingError
from palestra.core.types import Group, Problem, Rollout, Score, Turn
from palestra.train import checkpoint as checkpoint_module
from palestra.train.checkpoint import read_checkpoint, step_checkpoints, step_folder
from palestra.train.group_source import GroupSource, StepRollouts, draw
from palestra.train.update import learning_rate_at
from palestra.train.watcher import Interrupted

Play = Callable[[int, str], Sequence[Rollout]]
ONCE = {"train.refill_limit": 0}


def equal(number: int, problem: str) -> list[Rollout]:
    """Siblings with the same reward."""
    return [attempt(problem, 1.0) for _ in range(2)]


def differ(number: int, problem: str) -> list[Rollout]:
    return [attempt(problem, reward) for reward in (0.0, 1.0)]


def failing(number: int, problem: str) -> list[Rollout]:
    return [attempt(problem, 0.0) for _ in range(2)]


def only(*numbers: int, other: Play = equal) -> Play:
    """Signal in the groups of these draws alone."""
    return lambda number, problem: (differ if number in numbers else other)(number, problem)


def broken(number: int, problem: str) -> list[Rollout]:
    return [attempt(problem, 0.0, error=f"number {number} is broken")] * 2


def with_tool_results(number: int, problem: str) -> list[Rollout]:
    turn = Turn("environment", (6, 7))  # type: ignore[arg-type]
    return [replace(r, turns=(*r.turns, turn)) for r in equal(number, problem)]


def test_a_step_gathers_learns_and_then_gives_the_policy_the_next_version() -> None:
    seen: list[str] = []
    loop = ran({"seed": 7}, steps=2, play=lambda number, problem: seen.append(problem) or differ(number, problem))  # type: ignore[func-returns-value]
    step = ["collect 2", "forward_backward", "optim_step"]
    assert loop.calls == [*step, "update 1", *step, "update 2"]
    assert loop.policy.weight == loop.learner.weight == 2
    assert (loop.training.state.step, loop.training.state.policy_version) == (2, 2)
    assert [step for step, _ in loop.tracker.rows] == [1, 2]
    assert loop.tracker.groups == [(1, 2), (2, 2)]
    assert loop.rows[0]["loss"] == 0.5
    assert loop.collector.keys == ["7/0", "7/1", "7/2", "7/3"]
    assert seen == [p.id for p in draw(PROBLEMS, 0, 4, seed=7)]


@dataclass
class AheadCollector(FakeCollector):
    """Records what it prepares."""

    async def prepare(self, problems: Sequence[Problem], group_size: int) -> None:
        self.calls.append(f"prepare {', '.join(problem.id for problem in problems)}")

    def abandon(self) -> None:
        self.calls.append("abandon")


def ahead_loop(layer: Mapping[str, Any], steps: int, **collector: Any) -> Loop:
    loop = make_loop(layer, steps=steps)
    loop.training.source.collector = AheadCollector(loop.calls, loop.policy, **collector)  # type: ignore[attr-defined]
    return loop


def test_records_and_the_next_steps_episodes_are_made_ready_while_the_learner_works() -> None:
    loop = ahead_loop({"eval.every": 3}, steps=5)
    loop.tracker.rollouts = lambda step, groups: loop.calls.append(f"records {step}")  # type: ignore[method-assign]
    loop.training.run(evaluate=lambda step: loop.calls.append("evaluate") or 0.0)
    ids = [problem.id for problem in draw(PROBLEMS, 0, 10, seed=loop.training.config.seed)]
    expected = []
    for step in range(1, 6):
        # the last step has no next one, and before the fourth an evaluation may need the room
        ahead = [] if step in (3, 5) else [f"prepare {ids[2 * step]}, {ids[2 * step + 1]}"]
        expected += ["collect 2", "forward_backward", "optim_step", *ahead, f"records {step}", f"update {step}"]
        expected += ["evaluate"] if step == 3 else []
    assert loop.calls == expected


def test_a_step_without_signal_is_recorded_and_the_next_one_prepared_all_the_same() -> None:
    loop = ahead_loop(ONCE, steps=2, play=equal)
    loop.training.run()
    assert [call.split()[0] for call in loop.calls] == ["collect", "prepare", "collect"]
    assert loop.tracker.groups == [(1, 2), (2, 2)]
    assert loop.rows[0]["groups"] == 2.0


def test_a_step_without_signal_moves_the_schedules_on_and_publishes_nothing() -> None:
    layer = ONCE | {"train.scheduler": "linear", "echo.coefficient": 1.0, "echo.schedule": "linear"}
    loop = ran(layer, steps=4, play=only(0, 1, 4, 5, 6, 7))  # nothing in the second step
    assert [call for call in loop.calls if call.startswith("update")] == ["update 1", "update 2", "update 3"]
    train = loop.training.config.train
    assert loop.learner.rates == [learning_rate_at(step, train, 4) for step in (0, 2, 3)]
    assert [loss.echo_coefficient for loss in loop.learner.losses] == pytest.approx([1.0, 1 / 3, 0.0])
    assert "loss" not in loop.rows[1]
    assert loop.rows[1]["equal_reward_groups"] == 1.0
    assert (loop.training.state.step, loop.training.state.policy_version) == (4, 3)


@pytest.mark.parametrize(("coefficient", "steps_learned"), [(0.0, 0), (0.5, 2)])
def test_echo_learns_from_tool_results_with_full_updates_where_all_rewards_are_equal(coefficient, steps_learned):
    loop = ran(ONCE | {"echo.coefficient": coefficient}, steps=2, play=with_tool_results)
    assert [(loss.policy_tokens, loss.echo_tokens) for loss in loop.learner.losses] == [(0, 8)] * steps_learned
    assert loop.training.state.policy_version == steps_learned
    assert loop.learner.rates == [1.0] * steps_learned


EIGHT = ONCE | {"train.problems_per_step": 8, "train.full_update_share": 0.5}
MANY = ONCE | {"train.problems_per_step": 32}


@pytest.mark.parametrize(
    ("layer", "play", "rates"),
    [
        (EIGHT, only(3, *range(8, 12), other=failing), [0.25, 1.0]),
        (EIGHT | {"train.full_update_share": 0}, only(3, other=failing), [1.0]),
        (
            EIGHT | {"train.refill_limit": 1, "train.signal_share": 0.5},
            only(1, 9, 10, 11, *range(16, 24), other=failing),
            [1.0, 1.0],
        ),
        (MANY, only(*range(4)), [1.0]),
        (MANY, only(*range(4), other=failing), [0.5]),
    ],
    ids=["few groups", "share 0", "refilled groups count", "solved groups count", "failed ones do not"],
)
def test_steps_with_signal_in_few_groups_make_smaller_updates(layer, play, rates) -> None:
    loop = ran(layer, steps=2, play=play)
    assert loop.learner.rates[: len(rates)] == rates
    assert [row["update_scale"] for row in loop.rows][: len(rates)] == rates


def test_a_step_taken_by_hand_needs_no_total_and_no_folder_and_is_a_full_one_if_its_groups_have_signal() -> None:
    loop = make_loop(EIGHT, steps=None)
    sampled = StepRollouts([Group("p", tuple(differ(0, "p")))], [[-1.0, 1.0]], 0, 1.0)
    metrics = loop.training.learn(sampled, {"learner": 100.0, "decode": 2.0})
    assert loop.learner.rates == [1.0]
    # the time of a phase is that while sampling and that while learning
    assert metrics["learner_seconds"] > 100.0
    assert (metrics["decode_seconds"], metrics["loss"], loop.training.state.step) == (2.0, 0.5, 1)
    assert loop.training.step()["loss"] == 0.5
    with pytest.raises(StateError, match="no folder"):
        loop.training.checkpoint()


@pytest.mark.parametrize(
    ("layer", "play", "collected"),
    [
        ({"train.refill_limit": 2}, only(), [2, 4]),
        ({"train.refill_limit": 1}, only(), [2, 2]),
        ({"train.refill_limit": 1, "train.signal_share": 1}, only(0, 3), [2, 2]),
        ({}, only(1, 2), [2]),
        (ONCE, only(), [2]),
        ({"train.filter_equal_groups": False}, only(), [2]),
    ],
    ids=["none found", "limit met", "all must have signal", "one is enough", "off", "no filter"],
)
def test_refilling_draws_fresh_problems_up_to_the_limit(layer, play, collected) -> None:
    loop = ran(layer, steps=1, play=play)
    assert [call for call in loop.calls if call.startswith("collect")] == [f"collect {n}" for n in collected]
    drawn = sum(collected)
    assert loop.collector.keys == [f"0/{i}" for i in range(drawn)]  # never the same twice
    assert loop.training.state.source == {"cursor": drawn}
    assert loop.tracker.groups == [(1, drawn)]


def test_extra_sampling_is_explained_once() -> None:
    notes = ran({"train.refill_limit": 2}, steps=3, play=only(0, 1)).heard.notes
    assert ["train.signal_share" in note for note in notes] == [True]
    assert notes[0].startswith("step 2 sampled 6 groups instead of 2")


def test_a_source_that_cannot_be_refilled_is_asked_once() -> None:
    loop = make_loop(steps=1, play=equal)
    loop.training.source.refills = False
    loop.training.run()
    assert loop.calls == ["collect 2"]


@pytest.mark.parametrize(
    ("layer", "play", "rollouts", "failures"),
    [
        # number 2 takes the place of number 1, and fails
        ({"train.signal_share": 1}, lambda n, p: (broken if n == 2 else only(0, 3))(n, p), 12, 2),
        (ONCE, lambda n, p: (broken if n < 4 else differ)(n, p), 12, 8),
    ],
    ids=["a problem fails alone in a refill", "others are drawn where all attempts failed"],
)
def test_failed_attempts_do_not_end_the_run(layer: Mapping[str, Any], play: Play, rollouts: int, failures: int) -> None:
    [metrics] = ran(layer, steps=1, play=play).rows
    assert (metrics["rollouts"], metrics["rollout_failures"], metrics["loss"]) == (rollouts, failures, 0.5)


@pytest.mark.parametrize(("combine", "drawn"), [("sum_then_normalise", 6), ("normalise_then_sum", 2)])
def test_measures_that_sum_equally_are_not_refilled_if_each_is_normalised_first(combine: str, drawn: int) -> None:
    def play(number: int, problem: str) -> list[Rollout]:
        values = ({"a": 1.0, "b": 0.0, "c": 0.0}, {"a": 0.0, "b": 0.5, "c": 0.5})
        scores = [{name: Score(value, False) for name, value in each.items()} for each in values]
        return [replace(attempt(problem, 1.0), scores=each) for each in scores]

    loop = ran({"train.combine": combine}, steps=1, play=play)
    assert len(loop.collector.keys) == drawn
    assert loop.rows[0]["equal_reward_groups"] == (drawn == 6)


def test_a_measure_that_failed_is_counted_and_not_in_the_means() -> None:
    failed = {"right": Score(0.0, False, "measure right took longer than 60 s", error=True)}
    lost = replace(attempt("p", 0.0), scores=failed, error="measure right failed")
    [metrics] = ran(steps=1, play=lambda number, problem: [*differ(number, problem), lost]).rows
    assert (metrics["measure_errors"], metrics["pass_rate/right"], metrics["reward_mean"]) == (2, 0.5, 0.5)


@pytest.mark.parametrize("combine", ["sum_then_normalise", "normalise_then_sum"])
def test_different_score_names_in_one_step_are_reported_each_on_its_own(combine: str) -> None:
    def play(number: int, problem: str) -> list[Rollout]:
        return [attempt(problem, reward, name="ab"[number % 2]) for reward in (0.0, 1.0)]

    [metrics] = ran({"train.combine": combine}, steps=1, play=play).rows
    assert metrics["pass_rate/a"] == metrics["pass_rate/b"] == metrics["loss"] == 0.5


@dataclass
class OldGroups(GroupSource):
    """A source that gives groups of chosen versions, as a queue between two processes would."""

    ages: Iterator[int]
    max_staleness: int | None
    refills: bool = True
    given: int = 0

    reward_weights = {}  # noqa: RUF012

    async def next(self, count: int, version: int) -> list[Group]:
        self.given += count
        ages = [next(self.ages) for _ in range(count)]
        return [Group("p", tuple(attempt("p", r, version=version + age) for r in (0.0, 1.0))) for age in ages]

    def state(self) -> dict[str, Any]:
        return {"given": self.given}


@pytest.mark.parametrize(
    ("limit", "ages", "given", "dropped", "oldest"),
    [(0, [0, -1, 0], 3, 1, 0), (1, [-2, -3, -1, 0], 4, 2, 1), (None, [-9, -1], 2, 0, 9), (0, [-1] * 6, 6, 6, None)],
)
def test_stale_groups_are_dropped_replaced_and_counted(limit, ages, given, dropped, oldest) -> None:
    source = OldGroups(iter(ages), limit)
    loop = ran(steps=1, source=source)
    [metrics] = loop.rows
    assert source.given == given
    assert metrics.get("stale_groups_dropped", 0) == dropped
    assert metrics.get("staleness_max") == oldest
    assert metrics.get("rollouts", 0) == (0 if oldest is None else 4)
    assert bool(loop.calls) == (oldest is not None), "a step whose groups are all stale trains nothing"
    assert loop.training.state.step == 1


@pytest.mark.parametrize(("every", "expected"), [(0, []), (1, [1, 2, 3, 4, 5]), (2, [2, 4]), (4, [4]), (6, [])])
def test_evaluations_come_at_every_so_many_steps_but_not_at_the_last(every: int, expected: list[int]) -> None:
    loop, seen = make_loop({"eval.every": every}, steps=6), []
    loop.training.run(lambda step: seen.append((step, len(loop.rows))) or 0.0)  # type: ignore[func-returns-value]
    assert seen == [(step, step) for step in expected]


def test_the_watcher_hears_of_every_step_and_of_training_going_on_after_an_evaluation() -> None:
    loop, words = make_loop({"eval.every": 2}, steps=3), []
    loop.heard.phase = lambda name, total: words.append(f"{name} {total}")  # type: ignore[method-assign]
    loop.heard.advance = lambda done, metrics: words.append(f"{done} {metrics['loss']}")  # type: ignore[method-assign]
    loop.training.run(lambda step: 0.0)
    assert words == ["training 3", "1 0.5", "2 0.5", "training 3", "3 0.5"]


def names(checkpoints: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in step_checkpoints(checkpoints)]


def passing(*steps: int) -> Play:
    """Two groups a step: both siblings pass one of them in these steps, so that the mean reward is higher."""
    return lambda number, problem: (equal if number % 2 and number // 2 + 1 in steps else differ)(number, problem)


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
def test_the_newest_checkpoints_and_the_best_are_kept(layer, kept, tmp_path) -> None:
    ran(ONCE | {"checkpoint.every": 1}, layer, steps=6, checkpoints=tmp_path, play=passing(3))
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
def test_where_evaluations_happen_the_best_is_the_one_of_the_best_held_out_reward(layer, kept, tmp_path) -> None:
    base = ONCE | {"checkpoint.keep_last": 1, "eval.every": 2}
    loop = make_loop(base, layer, steps=6, checkpoints=tmp_path, play=passing(3))
    loop.training.run({2: 0.1, 4: 0.9}.__getitem__)
    assert names(tmp_path) == kept
    if 4 in kept:
        assert read_checkpoint(step_folder(tmp_path, 4)).best_reward == 0.9


@pytest.mark.parametrize(("every", "steps"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5])])
def test_the_log_has_a_line_every_so_many_steps_and_at_the_last(every, steps, caplog) -> None:
    with caplog.at_level("INFO", logger="palestra"):
        ran({"track.log_every": every}, steps=5)
    assert caplog.messages == [f"step {step} of 5: loss 0.5, reward_mean 0.5, pass_rate 0.5" for step in steps]


def test_a_resumed_loop_goes_on_where_the_checkpoint_was_written(tmp_path: Path) -> None:
    layer = {"checkpoint.every": 1, "train.target_entropy": 2.0, "train.refill_limit": 1}
    play = only(*range(0, 40, 2))
    straight = ran(layer, steps=4, play=play)
    first = ran(layer, steps=2, checkpoints=tmp_path, play=play)
    second = make_loop(layer, steps=4, checkpoints=tmp_path, play=play)
    folder = step_folder(tmp_path, 2)
    second.training.resume(folder, read_checkpoint(folder))
    assert second.calls == ["update 2"]  # the policy samples from the weights of the checkpoint
    assert second.policy.weight == second.learner.weight == 2
    assert second.training.state.entropy_coefficient == pytest.approx(0.01)
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


@pytest.mark.parametrize("while_", ["sampling", "learning"])
def test_ctrl_c_saves_the_last_whole_step(while_: str, tmp_path: Path) -> None:
    """While sampling this is the step before; learning goes on to the end of the step."""
    loop = make_loop(checkpoints=tmp_path, play=interrupt_at(5) if while_ == "sampling" else differ)
    if while_ == "learning":
        loop.learner.on_step = lambda weight: signal.raise_signal(signal.SIGINT) if weight == 1 else None
    with pytest.raises(Interrupted) as raised:
        loop.training.run()
    assert raised.value.checkpoint == step_folder(tmp_path, 2)
    state = read_checkpoint(raised.value.checkpoint)
    assert (state.step, state.source, state.policy_version) == (2, {"cursor": 4}, 2)
    assert (raised.value.checkpoint / "weight").read_text() == "2"
    assert [step for step, _ in loop.tracker.rows] == [1, 2]
    assert [call for call in loop.calls if call.startswith("update")] == ["update 1", "update 2"]


def test_ctrl_c_without_checkpoints_is_a_plain_one() -> None:
    with pytest.raises(KeyboardInterrupt) as raised:
        ran(play=interrupt_at(1))
    assert not isinstance(raised.value, Interrupted)


def failing_at(step: int, error: Exception) -> Callable[[int], None]:
    def fail(weight: int) -> None:
        if weight == step - 1:
            raise error

    return fail


MEMORY = ". To need less memory, in this order: a lower train.tokens_per_micro_batch (now 16384 or more, by the model)"


@pytest.mark.parametrize(
    ("error", "begins"),
    [
        (RuntimeError("cuBLAS failed"), "RuntimeError: cuBLAS failed. The"),
        (PalestraError("group 3: the loss is nan"), "group 3: the loss is nan. The"),
        (KeyError("sampled_tokens"), "KeyError: 'sampled_tokens'. The"),
        (RuntimeError("CUDA out of memory. Tried 2 GiB."), f"RuntimeError: CUDA out of memory. Tried 2 GiB{MEMORY}"),
        (MemoryError(), f"MemoryError{MEMORY}, model.gradient_checkpointing=true, a lower model.kv"),
    ],
)
def test_an_error_names_the_step_the_last_good_checkpoint_and_settings_that_take_less_memory(error, begins, tmp_path):
    loop = make_loop({"checkpoint.every": 2, "model.sleep_mode": True}, checkpoints=tmp_path)
    loop.learner.on_step = failing_at(4, error)
    with pytest.raises(TrainingError) as raised:
        loop.training.run()
    text = str(raised.value)
    assert text.startswith(f"step 4: {begins}")
    assert text.endswith(f"The last good checkpoint is {step_folder(tmp_path, 2)}")
    assert raised.value.__cause__ is error
    assert loop.training.state.step == 3  # what failed does not count
    assert names(tmp_path) == [2]
    assert loop.calls[-1] == "wake", "the policy is woken when the learner fails"


def test_an_error_in_the_first_step_says_that_there_is_no_checkpoint_yet() -> None:
    with pytest.raises(TrainingError, match=r"^step 1: every rollout failed; .* number 0 is broken\. No checkpoint"):
        ran(play=broken)


def full_at(limit: int, step_of: Callable[..., int]) -> Callable[..., None]:
    def full(*arguments: Any) -> None:
        if step_of(*arguments) == limit:
            raise OSError(28, "No space left on device")

    return full


def test_a_checkpoint_that_cannot_be_written_is_a_warning_and_not_the_best_one(tmp_path, monkeypatch) -> None:
    loop = make_loop({"checkpoint.every": 1, "checkpoint.keep_last": 9}, checkpoints=tmp_path, play=only(3))
    monkeypatch.setattr(loop.learner, "save", full_at(2, lambda folder: loop.training.state.step))
    loop.training.run()
    assert names(tmp_path) == [1, 3, 4]
    assert ["after step 2" in text and "No space left" in text for text in loop.heard.warnings].count(True) == 1
    assert loop.training.state.best_step != 2


def test_an_error_between_two_steps_names_the_step_before_it(tmp_path: Path) -> None:
    def fails(step: int) -> float:
        raise OSError(28, "No space left on device")

    loop = make_loop({"checkpoint.every": 1, "eval.every": 2}, checkpoints=tmp_path)
    with pytest.raises(TrainingError, match=r"^after step 2: .*step-000002$"):
        loop.training.run(fails)


def test_records_that_a_full_disk_refuses_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = make_loop({"checkpoint.every": 2}, checkpoints=tmp_path / "records")
    monkeypatch.setattr(records.tracker, "rollouts", full_at(4, lambda step, groups: step))
    with pytest.raises(TrainingError, match=r"^step 4: .*No space left on device.*checkpoint is .*step-000002$"):
        records.training.run()


def test_a_checkpoint_is_written_although_a_record_could_not_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop({"checkpoint.every": 2}, checkpoints=tmp_path)
    monkeypatch.setattr(loop.tracker, "flush", full_at(2, lambda: loop.training.state.step))
    with pytest.raises(TrainingError, match=r"No space left on device.*checkpoint is .*step-000002$"):
        loop.training.run()


def test_what_keeps_a_run_from_learning_is_reported_while_it_happens_and_once(caplog: pytest.LogCaptureFixture) -> None:
    loop, warned = make_loop(ONCE, steps=8, play=failing), []
    loop.heard.advance = lambda done, metrics: warned.append(len(loop.heard.warnings))  # type: ignore[method-assign]
    loop.training.run()
    assert warned == [0, 0, 0, 1, 1, 1, 1, 1]  # `advance` comes before the judgement of its step
    assert "in the last 3 steps every rollout earned a reward of 0, which teaches nothing" in loop.heard.warnings[0]
    assert loop.heard.warnings[0] in caplog.text, "without a display it is in the log"


@pytest.mark.parametrize(("count", "last"), [(0, 9), (2, 5), (3, 6), (20, 9)])
def test_a_run_ends_early_when_every_rollout_of_so_many_steps_passed(count: int, last: int, tmp_path: Path) -> None:
    layer = ONCE | {"train.stop_when_solved": count}
    loop = ran(layer, steps=9, checkpoints=tmp_path, play=only(0, 4, 5))  # all pass in steps 2 and 4 to 9
    assert loop.training.state.step == last
    assert names(tmp_path) == [last]
    early = f"every rollout of the last {count} steps passed, so the training ended after step {last} of 9 "
    assert [note.startswith(early) for note in loop.heard.notes] == [True] * (last < 9)
    assert (loop.training.ended_early is not None) == (last < 9)


def test_a_run_ends_after_the_step_that_reaches_its_limit_of_sampled_tokens(tmp_path: Path) -> None:
    in_a_step = ran(steps=4).training.state.sampled_tokens // 4
    loop = ran({"train.max_sampled_tokens": in_a_step + 1}, steps=4, checkpoints=tmp_path)
    assert loop.training.state.sampled_tokens == 2 * in_a_step > 0
    assert names(tmp_path) == [loop.training.state.step] == [2]
    assert "train.max_sampled_tokens" in (loop.training.ended_early or "")


def test_in_sleep_mode_the_policy_sleeps_while_the_learner_works() -> None:
    sleepy = {"model.sleep_mode": True}
    assert ran(sleepy, steps=1).calls == ["collect 2", "sleep", "forward_backward", "optim_step", "wake", "update 1"]
    assert ran(sleepy | ONCE, steps=1, play=equal).calls == ["collect 2"]


def test_the_entropy_controller_moves_by_what_the_step_measured_and_rests_without_signal() -> None:
    layer = ONCE | {"train.target_entropy": 2.0, "train.entropy_coefficient": 0.1}
    loop = make_loop(layer, steps=5, play=only(0, 1, 2, 3, 6, 7, 8, 9))  # nothing in the third step

    def measured(weight: int) -> None:
        loop.learner.entropy = 1.0 if weight < 2 else 3.0

    loop.learner.on_step = measured
    loop.training.run()
    used = [loss.entropy_coefficient for loss in loop.learner.losses]
    assert used == pytest.approx([0.1, 0.105, 0.11, 0.115])
    assert [row.get("entropy_coefficient") for row in loop.rows] == [used[0], used[1], None, used[2], used[3]]
    assert loop.training.state.entropy_coefficient == pytest.approx(0.11)  # one down at last


def test_a_nan_reward_stops_the_run_and_names_where(tmp_path: Path) -> None:
    """As a source in another process may post it; measures and reward functions are checked where they are called."""

    def play(number: int, problem: str) -> list[Rollout]:
        return [attempt(problem, reward) for reward in (float("nan") if number == 4 else 0.0, 1.0)]

    words = r"^step 3: the reward of rollout 0 in the group of problem .* is nan.*The last good checkpoint .*-000002$"
    with pytest.raises(TrainingError, match=words):  # two groups a step: the fifth is in step 3
        ran({"checkpoint.every": 1}, checkpoints=tmp_path, play=play)


def test_a_checkpoint_that_leaves_no_room_for_the_final_model_is_skipped(tmp_path, monkeypatch) -> None:
    loop = make_loop({"checkpoint.every": 1, "checkpoint.keep_last": 9}, checkpoints=tmp_path)
    loop.training.checkpoint_bytes, loop.training.model_bytes = 300, 100
    free, saved = {1: 400, 2: 399, 3: 1000, 4: 0}, list[int]()
    monkeypatch.setattr(checkpoint_module, "free_bytes", lambda path: free[loop.training.state.step])
    loop.training.save_model = lambda: saved.append(loop.training.state.step)
    loop.training.run()
    assert names(tmp_path) == [1, 3]
    assert [text.split(":")[0] for text in loop.heard.warnings[:2]] == [f"no checkpoint of step {n}" for n in (2, 4)]
    assert saved == [4]


def test_the_final_model_is_saved_before_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, order = make_loop({"checkpoint.every": 2}, checkpoints=tmp_path), list[str]()
    monkeypatch.setattr(loop.learner, "save", lambda folder: order.append(f"checkpoint {loop.training.state.step}"))
    loop.training.save_model = lambda: order.append("model")
    loop.training.run()
    assert order == ["checkpoint 2", "model", "checkpoint 4"]
