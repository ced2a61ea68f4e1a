"""Rejection sampling: which attempts are made, which of them become demonstrations, and when a stage ends."""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from builders import END, ScriptedPolicy, add, call_text
from scripted import ScriptedEnvironment, ScriptedEpisode

from palestra.core.config_sections import StagesSection
from palestra.core.types import Group, Message, Problem, Rollout, SamplingParams, Score, ToolResult, Turn
from palestra.models.chat.template import ChatFormat
from palestra.rollout.agent_loop import AttemptLimits, token_speakers
from palestra.rollout.collect import AgentLoop, Collector
from palestra.rollout.hints import Hint, quality
from palestra.train.demonstrations import DemonstrationStore
from palestra.train.rft import MIN_STEPS, RftSource

NAMES = ("easy", "ruled", "told", "parrot", "never")
SYSTEM = Message("system", "You add numbers.")
TOLD, RULED = "The right result is", "Call a tool before"


class Sum(ScriptedEpisode):
    expect = ""

    async def score(self, messages: Sequence[Message], tool_results: Sequence[ToolResult]) -> Mapping[str, Score]:
        right = self.expect in messages[-1].text
        return {"right": Score(float(right), right)}


@dataclass
class Sums(ScriptedEnvironment):
    """One sum for each name: 11 + 20, 12 + 20 and so on."""

    names: Sequence[str] = NAMES

    def problems(self, split: str) -> Sequence[Problem]:
        return [Problem(name, f"What is {11 + i} + 20?", str(31 + i)) for i, name in enumerate(self.names)]

    def open(self, problem: Problem) -> ScriptedEpisode:
        episode = Sum((SYSTEM, Message("user", str(problem.input))), self.tools)
        episode.expect = problem.expect
        return episode


class ReadingPolicy(ScriptedPolicy):
    """Answers what it reads: `say` gets the conversation so far, and how many turns were sampled before."""

    say: Callable[[str, int], str]

    async def sample(self, session: Any, params: SamplingParams) -> Turn:
        text = self.tokenizer.decode(session.token_ids)
        self.script = lambda number: self.say(text, number) + END
        return await super().sample(session, params)


def question(text: str) -> tuple[str, str, str]:
    """Both numbers of the question, and the conversation behind it."""
    tail = text[text.rindex("What is") :]
    found = re.match(r"What is (\d+) \+ (\d+)\?", tail)
    assert found is not None
    return found[1], found[2], tail


def by_name(names: Sequence[str]) -> Callable[[str, int], str]:
    """A model that solves each problem as the beginning of its name says."""

    def say(text: str, number: int) -> str:
        a, b, tail = question(text)
        name, total = names[int(a) - 11].split("-")[0], int(a) + int(b)
        if "tool_response" in tail:
            return "No idea." if name == "calls" else f"It is {total}."
        call = call_text(f'{{"a": {a}, "b": {b}}}')
        chance = {"easy": True, "calls": True, "ruled": RULED in text, "told": TOLD in text}
        if chance.get(name):
            return call
        is_guess = name == "guess" or (name == "parrot" and TOLD in text)
        return f"It is {total}." if is_guess else "No idea."

    return say


@dataclass
class Pass:
    """One call of a collector."""

    temperature: float
    attempts: int
    problems: list[str]
    hints: Mapping[str, Hint]
    forced_calls: int = 0


@dataclass
class Lab:
    """A source with a scripted model; `passes` are the attempts that it made."""

    source: RftSource
    chat: ChatFormat
    passes: list[Pass] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def step(self, count: int = 4) -> list[Group]:
        return asyncio.run(self.source.next(count, 0))

    def steps(self) -> int:
        """Steps to the end of the stage."""
        taken = 0
        while not self.source.is_done:
            taken += bool(self.step())
        return taken

    @property
    def stored(self) -> list[Rollout]:
        return self.source.store.rollouts

    @property
    def names(self) -> list[str]:
        return sorted(r.problem_id for r in self.stored)

    def text(self, rollout: Rollout) -> str:
        text: str = self.chat.tokenizer.decode([t for turn in rollout.turns for t in turn.token_ids.tolist()])
        return text


Build = Callable[..., Lab]


@pytest.fixture
def lab(tiny_tokenizer: Any, tmp_path: Path) -> Build:
    chat = ChatFormat(tiny_tokenizer)

    def build(
        names: Sequence[str] = NAMES,
        say: Callable[[str, int], str] | None = None,
        temperature: float = 0.8,
        path: str = "demonstrations.jsonl",
        **settings: Any,
    ) -> Lab:
        policy = ReadingPolicy(tiny_tokenizer, [])
        policy.say = say or by_name(names)
        limits = AttemptLimits(SamplingParams(200, stop_token_ids=chat.stop_token_ids))

        @dataclass
        class Recorded:
            environment: Any
            temperature: float
            forced_calls: int

            async def collect(self, problems: Any, attempts: int, keys: Any, on_rollout: Any) -> list[Group]:
                hints = dict(self.environment.hints)
                asked = [p.id for p in problems]
                made.passes.append(Pass(round(self.temperature, 6), attempts, asked, hints, self.forced_calls))
                collector = Collector(self.environment, AgentLoop(limits, token_speakers(policy, chat)))
                return await collector.collect(problems, attempts, keys, on_rollout)

        chosen = {"rft_attempts": 16, "rft_pass": 1000, "rft_until": 1.0} | settings
        source = RftSource(
            DemonstrationStore(tmp_path / path),
            seed=0,
            environment=Sums((add,), names=names),
            collector=Recorded,
            chat=chat,
            settings=StagesSection.model_validate(chosen),
            temperature=temperature,
            note=lambda text: made.notes.append(text),
        )
        made = Lab(source, chat)
        return made

    return build


def test_a_round_makes_plain_attempts_then_more_and_hotter_ones_with_hints_at_what_did_not_pass(lab: Build) -> None:
    made = lab()
    made.step()
    assert [(p.attempts, p.temperature, sorted(p.problems)) for p in made.passes] == [
        (8, 0.8, sorted(NAMES)),
        (8, 0.9, ["never", "parrot", "ruled", "told"]),
        (16, 1.0, ["never", "parrot", "told"]),
    ]
    plain, ruled, told = (p.hints for p in made.passes)
    assert plain == {}
    assert all(any(RULED in rule for rule in hint.rules) and not hint.tells_answer for hint in ruled.values())
    assert all(hint.tells_answer and hint.examples for hint in told.values())
    metrics = made.source.metrics
    assert (metrics["rft/attempts"], metrics["rft/pass_rate"]) == (8 * 5 + 8 * 4 + 16 * 3, 1 / 5)
    assert (metrics["rft/solved_cases"], metrics["rft/covered_cases"]) == (1 / 5, 3)
    assert made.names == ["easy", "ruled", "told"], "parrot only repeats the answer in its hint"
    assert all(quality(r) == 0 for r in made.stored)
    problems = {problem.id: problem for problem in made.source.environment.problems("train")}
    for rollout in made.stored:  # no hint is in a demonstration
        prompt = (SYSTEM, Message("user", problems[rollout.problem_id].input))
        assert rollout.messages[:2] == prompt
        assert rollout.turns[0].token_ids.tolist() == made.chat.prompt(prompt, [add.schema]).token_ids.tolist()
        text = made.text(rollout)
        assert text.count("What is") == 1, "no example"
        assert not any(words in text for words in (TOLD, RULED))
        assert all(message.text.count("What is") <= 1 for message in rollout.messages)


@pytest.mark.parametrize(
    ("names", "forced"),
    [
        (("easy", "easy-2", "never"), [0, 0, 0]),  # the median attempt calls, and some pass
        (("easy", "never", "never-2"), [0, 1, 1]),
        (("never", "never-2"), [0, 1, 2]),  # more in each pass, until something passes
        (("calls", "calls-2"), [0, 2, 3]),
    ],
)
def test_attempts_with_hints_begin_with_more_calls_than_plain_ones_make(lab, names, forced) -> None:
    made = lab(names)
    made.step()
    assert [p.forced_calls for p in made.passes] == forced


def test_a_round_in_which_plain_attempts_solve_many_new_cases_needs_no_hints(lab, monkeypatch) -> None:
    monkeypatch.setattr("palestra.train.rft.ENOUGH_CASES", 1)
    made = lab()
    made.step()
    assert [p.hints for p in made.passes] == [{}]


def test_a_pass_makes_more_attempts_at_fewer_cases(lab: Build) -> None:
    made = lab([f"never-{i}" for i in range(5)], rft_pass=32, rft_attempts=32)
    made.step()
    assert [(p.attempts, len(p.problems)) for p in made.passes] == [(8, 4), (8, 4), (16, 2), (32, 1)]


@pytest.mark.parametrize(("given", "expected"), [(1.15, [1.15, 1.2, 1.2]), (1.5, [1.5, 1.5, 1.5])])
def test_the_temperature_stays_within_bounds_and_is_never_lowered(lab, given, expected) -> None:
    made = lab(temperature=given)
    made.step()
    assert [p.temperature for p in made.passes] == expected


def test_without_hints_cases_are_attempted_again_all_the_same(lab: Build) -> None:
    made = lab(hints=False)
    made.step()
    assert [p.hints for p in made.passes] == [{}] * 3
    assert made.names == ["easy"]


def in_other_words(text: str, number: int) -> str:
    a, b, tail = question(text)
    if a == "13":
        return "No idea."
    words = ("It is", "That is", "So it is", "The sum is")[number % 4]
    return f"{words} {int(a) + int(b)}." if "tool_response" in tail else call_text(f'{{"a": {a}, "b": {b}}}')


def test_the_same_words_are_stored_once(lab: Build) -> None:
    made = lab(["easy"], rft_keep=4)
    made.step()
    made.source.steps_left = 0
    made.step()
    assert made.names == ["easy"], "nor in the next round"


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_at_most_a_few_are_kept_of_each_case(lab: Build, keep: int) -> None:
    made = lab(["first", "second"], in_other_words, rft_keep=keep)
    made.step()
    assert made.names == ["first"] * keep + ["second"] * keep
    assert len({made.text(r) for r in made.stored}) == 2 * keep


def guesses_an_argument(text: str, number: int) -> str:
    _, _, tail = question(text)
    if "tool_response" in tail:
        return "It is 31."
    return call_text('{"a": 30, "b": 1}' if number % 2 else '{"a": 11, "b": 20}')


@pytest.mark.parametrize(
    ("names", "say", "qualities"),
    [
        (["guess", "easy"], None, [0]),
        (["guess"], None, [3]),  # guesses only where there is nothing better
        (["parrot"], None, []),  # not even then, where the answer was in the hint
        (["one"], guesses_an_argument, [0]),  # calls with a guessed number give way to one from the question
    ],
)
def test_guesses_give_way_to_what_comes_from_the_question(lab, names, say, qualities) -> None:
    made = lab(names, say, rft_keep=4)
    made.step()
    assert [quality(r) for r in made.stored] == qualities
    if names == ["parrot"]:
        assert made.source.metrics["rft/hinted_pass_rate"] > 0


# When it ends.


def test_a_stage_ends_where_enough_cases_pass_or_nothing_does(lab: Build) -> None:
    made = lab(["easy-1", "easy-2", "never"], rft_until=0.6)
    assert made.step() == []
    assert made.source.is_done
    assert (made.source.round, made.source.metrics["rft/solved_cases"]) == (1, pytest.approx(2 / 3))
    assert len(made.passes) == 1, "hints are for models that need them"
    hopeless = lab(["never-1", "never-2"], path="hopeless.jsonl")
    assert hopeless.step() == []
    assert hopeless.source.is_done
    assert hopeless.stored == []


@pytest.mark.parametrize(("rounds", "last"), [(50, 2), (1, 1)], ids=["nothing new", "last round"])
def test_a_stage_ends_after_a_round_that_found_nothing_new_and_after_its_last_one(lab, rounds, last) -> None:
    made = lab(rft_rounds=rounds)
    assert made.steps() == MIN_STEPS, "the model has learned nothing, so a second round finds the same"
    assert made.source.round == len(made.notes) == last
    again = lab(rft_rounds=rounds)
    again.source.restore(made.source.state())
    assert again.source.is_done


def test_a_round_trains_on_all_that_was_found_so_far(lab: Build) -> None:
    made = lab(["easy", "ruled", "never"])
    drawn = {group.problem_id for _ in range(MIN_STEPS) for group in made.step(1)}
    assert drawn == {"easy", "ruled"}


# Going on.


def test_a_restored_source_goes_on_in_its_round(lab: Build, tmp_path: Path) -> None:
    made = lab()
    made.step(2)
    made.step(2)
    state = made.source.state()
    expected = [[group.problem_id for group in made.step(2)] for _ in range(3)]

    again = lab()
    again.source.restore(state)
    assert [[group.problem_id for group in again.step(2)] for _ in range(3)] == expected
    assert again.passes == [], "the round's attempts are not made again"
    assert again.source.state() == made.source.state()


def test_a_restored_source_makes_a_later_round_again(lab: Build) -> None:
    names = ["first", "second", "never"]
    made = lab(names, in_other_words, rft_keep=1)
    made.step()
    state = made.source.state()
    assert made.names == ["first", "second"]
    made.source.settings = made.source.settings.model_copy(update={"rft_keep": 3})
    made.source.steps_left = 0
    made.step()
    assert len(made.stored) == 6
    again = lab(names, in_other_words, rft_keep=3)
    assert len(again.stored) == 6, "as the file has them"
    again.source.restore(state)
    assert again.names == ["first", "second"]
    assert (again.source.round, again.source.best, again.source.is_done) == (1, pytest.approx(2 / 3), False)
    again.source.steps_left = 0
    again.step()
    assert [made.text(r) for r in again.stored] == [made.text(r) for r in made.stored]
