"""Groups prepared before the policy may be asked: used once, by who asks for them, and closed by all others."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from builders import wait_until
from scripted import ANSWER, CALL, ScriptedEnvironment, ScriptedPolicy

from palestra.core import calls
from palestra.core.errors import PalestraError
from palestra.core.extras import provided
from palestra.core.types import Problem, SamplingParams
from palestra.envs import running as opening
from palestra.models.chat.template import ChatFormat
from palestra.rollout.agent_loop import AttemptLimits, token_speakers
from palestra.rollout.collect import AgentLoop, Collector
from palestra.train.group_source import ProblemSource

PROBLEMS = [Problem(str(i), f"What is {i} + 3?") for i in range(4)]
TOO_LONG = Problem("long", "What is " + "2 + " * 400 + "3?")


class Prepared:
    """A collector whose episodes open at once, and its environment and policy."""

    def __init__(self, tokenizer: Any) -> None:
        chat = ChatFormat(tokenizer)
        self.environment, self.policy = ScriptedEnvironment(), ScriptedPolicy(tokenizer, [CALL, ANSWER], context=700)
        limits = AttemptLimits(SamplingParams(400, stop_token_ids=chat.stop_token_ids))
        self.collector = Collector(self.environment, AgentLoop(limits, token_speakers(self.policy, chat)))
        self.collect(PROBLEMS[0])  # then it is known that they open at once
        self.environment.episodes.clear()

    def prepare(self, *problems: Problem, size: int = 2) -> int:
        """How many episodes are open then."""
        asyncio.run(self.collector.prepare(problems, size))
        wait_until(lambda: not calls._ending)  # what is not kept is closed in the background
        return sum(not episode.closed for episode in self.environment.episodes)

    def collect(self, *problems: Problem, size: int = 2) -> list[Any]:
        keys = [f"key/{problem.id}" for problem in problems]
        groups = asyncio.run(self.collector.collect(problems, size, keys))
        return [(group.problem_id, [(r.messages, r.stop, r.error) for r in group.rollouts]) for group in groups]

    def assert_all_closed(self) -> None:
        wait_until(lambda: {episode.closed for episode in self.environment.episodes} == {1})
        assert self.policy.opened == self.policy.closed


@pytest.fixture
def world(tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Prepared:
    monkeypatch.setattr(opening, "QUICK_S", 5.0)
    monkeypatch.setattr(opening, "SLOW_S", 5.0)
    return Prepared(tiny_tokenizer)


def test_prepared_groups_are_attempted_as_others_are_with_the_same_seeds(world: Prepared) -> None:
    expected = world.collect(*PROBLEMS)
    seeds = [params.seed for params in world.policy.params[-16:]]
    world.environment.episodes.clear()
    assert world.prepare(*PROBLEMS[:3]) == 6
    assert world.collect(*PROBLEMS) == expected
    assert [params.seed for params in world.policy.params[-16:]] == seeds
    assert len(world.environment.episodes) == 8, "prepared ones are not opened again"
    world.assert_all_closed()


@pytest.mark.parametrize("ask", ["other problems", "fewer", "another size", "nobody"])
def test_what_is_not_asked_for_is_closed(world: Prepared, ask: str) -> None:
    assert world.prepare(*PROBLEMS[:2]) == 4
    if ask == "other problems":
        assert [name for name, _ in world.collect(PROBLEMS[2], PROBLEMS[1])] == ["2", "1"]
        assert len(world.environment.episodes) == 4 + 2, "the second was prepared"
    elif ask == "fewer":
        world.collect(PROBLEMS[0])
        assert len(world.environment.episodes) == 4
    elif ask == "another size":
        world.collect(*PROBLEMS[:2], size=1)
        assert len(world.environment.episodes) == 4 + 2
    else:
        ProblemSource(world.collector, PROBLEMS, {}, group_size=2, seed=0).close()
    world.assert_all_closed()


def test_preparing_again_closes_what_was_prepared_before(world: Prepared) -> None:
    world.prepare(*PROBLEMS[:2])
    assert world.prepare(*PROBLEMS[2:]) == 4
    world.collector.abandon()
    world.assert_all_closed()


def test_a_prompt_that_is_refused_is_left_to_the_attempt(world: Prepared) -> None:
    assert world.prepare(PROBLEMS[0], TOO_LONG, PROBLEMS[1]) == 2
    (_, good), (_, bad), (_, later) = world.collect(PROBLEMS[0], TOO_LONG, PROBLEMS[1])
    assert [(stop, error) for _, stop, error in good + later] == [("answered", None)] * 4
    assert all("the model's context holds 700" in error for _, _, error in bad)
    world.assert_all_closed()


def test_an_environment_that_takes_its_time_or_few_at_a_time_is_not_asked_ahead(world, monkeypatch) -> None:
    monkeypatch.setattr(world.environment, "max_episodes", 8, raising=False)
    assert world.prepare(*PROBLEMS) == 0
    monkeypatch.delattr(world.environment, "max_episodes")
    monkeypatch.setattr(world.collector._opener, "is_quick", False)
    assert world.prepare(*PROBLEMS) == 0


def test_an_episode_that_does_not_open_is_left_to_the_attempt(world: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    opens = world.environment.open

    def broken(problem: Problem) -> Any:
        if problem is PROBLEMS[1]:
            raise PalestraError("no such door")
        return opens(problem)

    monkeypatch.setattr(world.environment, "open", broken)
    assert world.prepare(*PROBLEMS) == 2
    groups = world.collect(*PROBLEMS)
    errors = [error for _, rollouts in groups for _, _, error in rollouts]
    assert errors == [None] * 2 + ["opening an episode raised PalestraError: no such door"] * 2 + [None] * 4
    world.assert_all_closed()


def test_each_of_several_ranks_prepares_its_own_problems(world: Prepared) -> None:
    shared = provided("rollouts of several ranks")(SimpleNamespace(rank=1, size=2), world.collector)  # type: ignore[arg-type]
    asyncio.run(shared.prepare(PROBLEMS, 2))
    world.collect(PROBLEMS[1], PROBLEMS[3])
    assert [episode.prompt[-1].text for episode in world.environment.episodes] == [
        problem.input for problem in (PROBLEMS[1], PROBLEMS[1], PROBLEMS[3], PROBLEMS[3])
    ]
    asyncio.run(shared.prepare(PROBLEMS, 2))
    shared.abandon()
    world.assert_all_closed()


def test_the_source_prepares_what_it_draws_next_and_stays_where_it_is(world: Prepared) -> None:
    source = ProblemSource(world.collector, PROBLEMS, {}, group_size=2, seed=3)
    asyncio.run(source.next(1, version=0))
    before = source.state()
    asyncio.run(source.prepare(2))
    assert source.state() == before
    opened = len(world.environment.episodes)
    asyncio.run(source.next(2, version=0))
    assert len(world.environment.episodes) == opened
    world.assert_all_closed()
