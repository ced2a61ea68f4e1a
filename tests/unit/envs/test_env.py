"""An environment of one's own: problems, attempts apart from each other, and every mistake an attempt's own."""

import asyncio
import random
from typing import Any

import pytest
from playing import attempt

from palestra import Env, EnvConfig, fail_reason, pass_reason
from palestra.core.errors import PalestraError
from palestra.core.types import Message, Problem, Rollout, Score
from palestra.envs.base import Environment
from palestra.envs.env import default_name, env_name
from palestra.envs.running import RunningEnv
from palestra.rollout.collect import scored_together


class Sums(Env):
    """Add two numbers."""

    instructions = "Use the tools."

    def make_problem(self, rng: random.Random) -> Any:
        a, b = rng.randint(1, 99), rng.randint(1, 99)
        return f"What is {a} + {b}?", a + b

    def start(self) -> None:
        self.calls = 0

    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        self.calls += 1
        return a + b

    def score(self, answer: str) -> Any:
        return answer == str(self.problem.expect)

    def _helper(self) -> None: ...


def say(text: str) -> list[Message]:
    return [Message("user", "?"), Message("assistant", text)]


def score(environment: Environment, text: str, problem: Problem | None = None) -> Any:
    episode = environment.open(problem or environment.problems("train")[0])
    return dict(asyncio.run(episode.score(say(text), [])))


def test_problems_depend_on_the_seed_alone_and_none_is_both_trained_on_and_held_out():
    first, again, other = (RunningEnv(Sums(EnvConfig(seed=seed))).problems("train") for seed in (1, 1, 2))
    assert len(first) == 1000
    assert [first[7], first[-1]] == [again[7], again[999]]
    assert first[7] != other[7]
    assert [p.id for p in first[:2]] == ["train-0", "train-1"]
    running = RunningEnv(Sums(EnvConfig(train_size=3000)))
    train, held_out = ({p.input for p in running.problems(split)} for split in ("train", "held_out"))
    assert len(train) > 1000
    assert len(held_out) > 80
    assert not train & held_out


def test_an_attempt_has_instructions_question_and_public_methods_as_tools():
    running: Environment = RunningEnv(Sums())
    problem = running.problems("train")[0]
    episode = running.open(problem)
    assert [m.text for m in episode.prompt] == ["Use the tools.", problem.input]
    assert [t.name for t in episode.tools] == ["add"]
    assert episode.tools[0].fn(2, 3) == 5
    assert asyncio.run(episode.reply(say("4"))) == ()
    assert score(running, f"<think>it may be 1</think>{problem.expect}")["score"].passed


def test_nothing_leaks_between_attempts():
    running = RunningEnv(Sums())
    one, other = (running.open(running.problems("train")[i]) for i in (0, 1))
    one.tools[0].fn(1, 2)
    assert one.env.calls == 1  # type: ignore[attr-defined]
    assert other.env.calls == 0  # type: ignore[attr-defined]
    assert one.env.problem != other.env.problem
    assert not hasattr(running.env, "calls")


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (True, {"score": Score(1.0, True)}),
        (0.4, {"score": Score(0.4, False)}),
        (pass_reason("good"), {"score": Score(1.0, True, "good")}),
        ({"right": 1, "short": fail_reason("long")}, {"right": Score(1.0, True), "short": Score(0.0, False, "long")}),
    ],
)
def test_a_score_may_have_several_forms(verdict, expected):
    class Forms(Sums):
        def score(self, answer: str) -> Any:
            return verdict

    assert score(RunningEnv(Forms()), "1") == expected
    verdict = float("nan")
    assert score(RunningEnv(Forms()), "1")["score"].error, "no number"


def test_step_goes_on_until_it_says_nothing():
    class Guess(Sums):
        def step(self, answer: str) -> str | None:
            self.calls += 1
            return None if self.calls == 3 else "No. Again!"

    running = RunningEnv(Guess())
    episode = running.open(running.problems("train")[0])
    replies = [asyncio.run(episode.reply(say("9"))) for _ in range(3)]
    assert replies == [(Message("user", "No. Again!"),), (Message("user", "No. Again!"),), ()]


def test_problems_may_be_a_list_or_an_endless_iterator():
    class Lists(Sums):
        def problems(self, split):
            return [f"{split}?"] if split == "held_out" else (f"{i}?" for i in range(10**9))

    running = RunningEnv(Lists(EnvConfig(train_size=5)))
    assert [p.input for p in running.problems("train")] == ["0?", "1?", "2?", "3?", "4?"]
    assert [p.input for p in running.problems("held_out")] == ["held_out?"]


def test_items_handed_out_one_by_one_are_dealt_out_and_none_is_lost():
    class Items(Sums):
        def setup(self) -> None:
            self.left = [f"question {i}" for i in range(200)]

        def get_next_item(self) -> Any:
            return self.left.pop() if self.left else None

    running = RunningEnv(Items())
    train, held_out = ([p.input for p in running.problems(split)] for split in ("train", "held_out"))
    assert sorted(train + held_out) == sorted(f"question {i}" for i in range(200))
    assert 20 < len(held_out) < 60
    assert [tool.name for tool in running.open(running.problems("train")[0]).tools] == ["add"]


def test_too_few_problems_to_hold_any_out_leave_all_for_training():
    class One(Sums):
        def make_problem(self, rng: random.Random) -> Any:
            return "What is 1 + 2?", 3

    running = RunningEnv(One(EnvConfig(held_out_share=0.001)))
    assert len(running.problems("train")) == 1000
    assert len(running.problems("held_out")) == 0


@pytest.mark.parametrize("method", ["make_problem", "start", "tools", "step", "score"])
@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(3)])
def test_what_a_method_raises_fails_its_attempt_only(method, error):
    def broken(self, *_: Any) -> Any:
        raise error

    running = RunningEnv(type("Broken", (Sums,), {method: broken})())
    episode = running.open(running.problems("train")[0])

    async def attempt() -> None:
        await episode.reply(say("1"))
        await episode.score(say("1"), [])

    with pytest.raises(Exception, match=r"broken|3"):
        asyncio.run(attempt())
    episode.close()


def test_long_texts_of_start_and_step_are_cut_like_tool_results_before_they_are_tokenised():
    class Long(Sums):
        def start(self):
            return "a" * 5_000_000

        def step(self, answer):
            return "b" * 5_000_000 if len(self.messages) < 4 else None

    (group,) = attempt(RunningEnv(Long()), lambda messages: "5", count=1, max_tool_result_chars=1000)
    question, _, reply, _ = [m.text for m in group.rollouts[0].messages if m.role != "system"]
    cut = "\n[cut off: these are the first 1000 of 5000000 characters]"
    assert question.endswith("\n\n" + "a" * 1000 + cut)
    assert reply == "b" * 1000 + cut


def test_close_that_raises_is_only_a_warning(caplog):
    def close(self: Any) -> None:
        raise OSError("gone")

    running = RunningEnv(type("Broken", (Sums,), {"close": close})())
    running.open(running.problems("train")[0]).close()
    assert "gone" in caplog.text


def broken(self, *_: Any) -> Any:
    raise OSError("no data")


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("setup", "Broken.setup raised OSError: no data"),
        ("problems", "Broken.problems raised OSError: no data"),
        ("a_tool", "tool 'broken' has no docstring"),
    ],
)
def test_what_is_wrong_before_any_attempt_is_an_error_with_its_reason(method, words):
    with pytest.raises(PalestraError, match=words):
        RunningEnv(type("Broken", (Sums,), {method: broken})()).problems("train")


def test_a_name_is_the_class_unless_it_gives_one():
    assert env_name(Sums) == "sums"
    assert env_name(type("More", (Sums,), {"name": "more/sums"})) == "more/sums"
    assert default_name("SQLEnv") == "sqlenv"
    assert default_name("GuessTheNumberEnv") == "guess-the-number"


class Shortest(Sums):
    """The shortest of the right answers wins."""

    def score_group(self, attempts: Any) -> Any:
        lengths = [len(attempt.messages[-1].text) for attempt in attempts]
        return [{"shortest": length == min(lengths)} for length in lengths]


async def score_all(environment: RunningEnv, *texts: str) -> Any:
    episodes = [environment.open(environment.problems("train")[0]) for _ in texts]
    rollouts = []
    for episode, text in zip(episodes, texts, strict=True):
        scores = {} if text == "failed" else dict(await episode.score(say(text), []))
        rollouts.append(Rollout("p", (), (), "answered", scores=scores, error="no" if text == "failed" else None))
    return await scored_together(environment, episodes, rollouts)


def test_siblings_are_scored_together_beside_their_own_scores_and_without_those_that_failed():
    rollouts = asyncio.run(score_all(RunningEnv(Shortest()), "abc", "failed", "ab"))
    assert [sorted(rollout.scores) for rollout in rollouts] == [["score", "shortest"], [], ["score", "shortest"]]
    assert [rollout.scores["shortest"].passed for rollout in rollouts if rollout.scores] == [False, True]

    class Alone(Shortest):
        score = Env.score

    assert [sorted(r.scores) for r in asyncio.run(score_all(RunningEnv(Alone()), "abc", "ab"))] == [["shortest"]] * 2


@pytest.mark.parametrize(
    ("found", "words"), [([1.0], "gave 1 scores for 2 attempts; return one each"), (lambda: 1 / 0, "ZeroDivisionError")]
)
def test_a_group_that_cannot_be_scored_fails_and_says_why(found: Any, words: str):
    class Broken(Sums):
        def score_group(self, attempts: Any) -> Any:
            return found() if callable(found) else found

    rollouts = asyncio.run(score_all(RunningEnv(Broken()), "abc", "ab"))
    assert all(rollout.stop == "failed" and words in str(rollout.error) for rollout in rollouts)
