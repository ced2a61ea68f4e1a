"""Groups of attempts: a failure stays its own problem's, every episode is closed, rewards come before that."""

import asyncio
import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from scripted import ANSWER, CALL, ScriptedEnvironment, ScriptedEpisode, ScriptedPolicy

from palestra import function_tool
from palestra.core import calls
from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError, UserCodeError
from palestra.core.types import Group, Message, Problem, Rollout, SamplingParams, Score
from palestra.models.chat.template import ChatFormat
from palestra.rollout.agent_loop import AttemptLimits, token_speakers
from palestra.rollout.collect import AgentLoop, Collector, require_one_good, seed_of
from palestra.rollout.evaluate import evaluate
from palestra.rollout.rewards import RewardFunctions
from palestra.train.group_source import ProblemSource, draw, gather

GOOD = Problem("good", "What is 2 + 3?", 5, {"difficulty": 2})
TOO_LONG = Problem("long", "What is " + "2 + " * 400 + "3?")
REFUSED = Problem("refused", "A forbidden question")
REFUSES = '{%- for m in messages if "forbidden" in m.content -%}{{ raise_exception("not this one") }}{%- endfor -%}'


@dataclass
class World:
    """A collector with a scripted policy and environment."""

    tokenizer: Any
    script: Sequence[str] = (CALL, ANSWER)
    environment: ScriptedEnvironment = field(default_factory=ScriptedEnvironment)
    reward_functions: tuple[Any, ...] = ()
    policy: ScriptedPolicy = field(init=False)
    collector: Collector = field(init=False)

    def __post_init__(self) -> None:
        chat = ChatFormat(self.tokenizer)
        self.policy = ScriptedPolicy(self.tokenizer, list(self.script), context=700)
        limits = AttemptLimits(SamplingParams(400, stop_token_ids=chat.stop_token_ids))
        start = token_speakers(self.policy, chat)
        rewards = RewardFunctions(self.reward_functions, measures=self.environment.reward_weights)
        self.collector = Collector(self.environment, AgentLoop(limits, start), rewards)

    def collect(self, *problems: Problem, size: int = 2, **more: Any) -> list[Group]:
        keys = [f"key/{i}" for i in range(len(problems))]
        return asyncio.run(self.collector.collect(problems, size, keys, **more))

    def assert_all_closed(self) -> None:
        assert [episode.closed for episode in self.environment.episodes] == [1] * len(self.environment.episodes)
        assert self.policy.opened == self.policy.closed


@pytest.fixture
def tokenizer(tiny_tokenizer: Any) -> Any:
    """The embedded one, with a template that refuses some questions."""
    strict = copy.deepcopy(tiny_tokenizer)
    strict.chat_template = REFUSES + strict.chat_template
    return strict


def test_every_sibling_of_every_problem_is_attempted_and_closed(tokenizer):
    world, seen = World(tokenizer), []
    groups = world.collect(GOOD, Problem("other", "What is 3 + 2?"), size=3, on_rollout=seen.append)
    assert [(g.problem_id, len(g.rollouts)) for g in groups] == [("good", 3), ("other", 3)]
    assert {r.error for g in groups for r in g.rollouts} == {None}
    assert [r.reward for r in groups[0].rollouts] == [1.0] * 3
    assert len(seen) == 6
    world.assert_all_closed()
    seeds = [params.seed for params in world.policy.params]
    assert len(set(seeds)) == len(seeds) == 12, "siblings and turns have seeds of their own"


@pytest.mark.parametrize(
    ("problem", "words"),
    [(TOO_LONG, "the model's context holds 700"), (REFUSED, "not this one")],
    ids=["too long", "refused by the template"],
)
def test_a_prompt_that_is_refused_fails_its_own_group_and_closes_its_episodes(tokenizer, problem, words):
    world, seen = World(tokenizer), []
    bad, good = world.collect(problem, GOOD, on_rollout=seen.append)
    assert [r.stop for r in bad.rollouts] == ["failed"] * 2
    assert all(words in r.error for r in bad.rollouts)
    assert bad.rollouts[0].messages == (Message("user", problem.input),)
    assert [r.error for r in good.rollouts] == [None, None]
    assert len(seen) == 4
    world.assert_all_closed()
    require_one_good([bad, good])


@dataclass
class HalfEqual:
    """A collector of whose groups those of odd problems have equal rewards."""

    drawn: list[int] = field(default_factory=list)

    async def collect(self, problems, group_size, seed_keys, on_rollout):
        self.drawn.append(len(problems))

        def attempt(problem, i):
            return Rollout(problem.id, (), (), "answered", reward=float(int(problem.id) % 2 and i % 2))

        return [Group(p.id, tuple(attempt(p, i) for i in range(group_size))) for p in problems]


@pytest.mark.parametrize("rate", [1.0, 0.5, 0.1])
def test_dynamic_sampling_has_the_same_groups_however_many_are_drawn_at_once(rate):
    problems = [Problem(str(i), "x") for i in range(100)]
    config = RunConfig.build({"train.refill_limit": 20, "train.signal_share": 1})
    source = ProblemSource(collector := HalfEqual(), problems, {}, group_size=2, seed=0)
    step = asyncio.run(gather(source, 7, config, 0, rate))
    with_signal = [int(g.problem_id) % 2 for g in step.groups]
    assert sum(with_signal) == 7
    assert with_signal[-1] == 1
    assert source.drawn == len(step.groups)
    assert [g.problem_id for g in step.groups] == [p.id for p in draw(problems, 0, len(step.groups), seed=0)]
    assert (len(collector.drawn) == 1) == (rate < 1)
    assert step.signal_rate == 7 / len(step.groups)


@pytest.mark.parametrize(
    ("count", "lacks", "share", "draws"),
    [
        *((16, 14, 1 / 16, 1), (16, 16, 1 / 16, 2), (64, 60, 1 / 16, 1), (64, 61, 1 / 16, 2)),
        *((16, 2, 7 / 8, 1), (16, 3, 7 / 8, 2), (7, 1, 7 / 8, 2), (8, 1, 1, 2)),
    ],
)
def test_fresh_problems_are_drawn_where_too_few_groups_have_signal(monkeypatch, count, lacks, share, draws):
    ids = [2 * i if i < lacks else 2 * i + 1 for i in range(3 * count)]
    problems = [Problem(str(i), "x") for i in ids]
    monkeypatch.setattr(
        "palestra.train.group_source.draw", lambda problems, start, count, seed: problems[start:][:count]
    )
    source = ProblemSource(collector := HalfEqual(), problems, {}, group_size=2, seed=0)
    step = asyncio.run(gather(source, count, RunConfig.build({"train.signal_share": share}), 0))
    assert len(collector.drawn) == draws
    assert step.signal_rate == (count - lacks) / count if draws == 1 else len(step.groups) > count
    assert step.signal_rate * len(step.groups) >= share * count


def test_when_every_prompt_is_refused_the_first_reason_is_told(tokenizer):
    world = World(tokenizer)
    with pytest.raises(PalestraError, match=r"every rollout failed; the first error was .*not this one"):
        asyncio.run(evaluate(world.collector, [REFUSED, TOO_LONG]))
    world.assert_all_closed()


class DifferentOpenings(ScriptedEnvironment):
    """Every attempt at a problem begins differently; the second one too long."""

    def open(self, problem: Problem) -> ScriptedEpisode:
        episode = super().open(problem)
        more = "again and " * 300 if len(self.episodes) == 2 else str(len(self.episodes))
        episode.prompt = (*episode.prompt, Message("user", more))
        return episode


def test_siblings_with_prompts_of_their_own_leave_no_session_open_when_one_is_refused(tokenizer):
    world = World(tokenizer, environment=DifferentOpenings())
    (group,) = world.collect(GOOD, size=3)
    assert [r.stop for r in group.rollouts] == ["failed"] * 3
    assert "context holds" in group.rollouts[0].error
    world.assert_all_closed()


class SomeDoNotOpen(ScriptedEnvironment):
    def open(self, problem: Problem) -> ScriptedEpisode:
        if problem.id == "closed" and len(self.episodes) == 1:
            raise ConnectionError("no server")
        return super().open(problem)


def test_an_environment_that_does_not_open_fails_its_own_group_and_closes_the_siblings(tokenizer):
    world, seen = World(tokenizer, environment=SomeDoNotOpen()), []
    bad, good = world.collect(Problem("closed", "What is 2 + 3?"), GOOD, on_rollout=seen.append)
    assert {r.error for r in bad.rollouts} == {"opening an episode raised ConnectionError: no server"}
    assert [r.error for r in good.rollouts] == [None, None]
    assert len(seen) == 4
    world.assert_all_closed()


@dataclass
class CountsOpen(ScriptedEnvironment):
    most: int = 0

    def open(self, problem: Problem) -> ScriptedEpisode:
        episode = super().open(problem)
        self.most = max(self.most, sum(not e.closed for e in self.episodes))
        return episode


@pytest.mark.parametrize(("limit", "most"), [(4, 4), (5, 4), (1, 2), (100, 20)])
def test_no_more_episodes_are_open_than_allowed_but_always_one_group(tokenizer, limit, most):
    world = World(tokenizer, environment=CountsOpen())
    collector = replace(world.collector, max_open_episodes=limit)
    problems = [Problem(str(i), f"What is {i} + 3?") for i in range(10)]
    groups = asyncio.run(collector.collect(problems, 2, [f"key/{i}" for i in range(10)]))
    assert [g.problem_id for g in groups] == [p.id for p in problems]
    assert world.environment.most == most
    world.assert_all_closed()


@pytest.mark.parametrize("limit", [2, 100])
def test_the_rollouts_do_not_depend_on_how_many_episodes_are_open(tokenizer, limit):
    world = World(tokenizer)
    collector = replace(world.collector, max_open_episodes=limit)
    asyncio.run(collector.collect([GOOD] * 4, 2, [f"key/{i}" for i in range(4)]))
    expected = {seed_of(f"key/{i}/{k}") + turn for i in range(4) for k in range(2) for turn in range(2)}
    assert {params.seed for params in world.policy.params} == expected


class FailingJudge(ScriptedEnvironment):
    """Its second measure, a judge, cannot be reached for the first episode."""

    def open(self, problem: Problem) -> ScriptedEpisode:
        episode = super().open(problem)
        down = len(self.episodes) == 1

        async def score(messages: Any, tool_results: Any) -> dict[str, Score]:
            judged = Score(0.0, False, "measure judge raised HTTPError: 503", error=True) if down else Score(1.0, True)
            return {"right": Score(1.0, True), "judge": judged}

        episode.score = score
        return episode


@pytest.mark.parametrize(("weight", "error"), [(0.5, "measure judge raised HTTPError: 503"), (0.0, None)])
def test_a_rollout_whose_judge_failed_is_left_out_unless_the_judge_counts_for_nothing(tokenizer, weight, error):
    environment = FailingJudge(reward_weights={"right": 0.5, "judge": weight})
    (group,) = World(tokenizer, environment=environment).collect(GOOD)
    assert [r.error for r in group.rollouts] == [error, None]
    assert [r.stop for r in group.rollouts] == ["answered", "answered"]


def test_without_threads_left_the_run_ends_loudly_and_nothing_is_scored(tokenizer, monkeypatch):
    monkeypatch.setattr(calls, "MAX_HUNG_CALLS", 0)
    release = threading.Event()

    @function_tool
    def add(a: int, b: int) -> int:
        """Add, some day."""
        release.wait(30)
        return a + b

    world = World(tokenizer, environment=ScriptedEnvironment(tools=(add,)))
    loop = replace(world.collector.runner, limits=replace(world.collector.runner.limits, tool_timeout_s=0.3))
    collector = replace(world.collector, runner=loop)
    with pytest.raises(UserCodeError, match="1 calls of tools, measures or environments ran past their time limit"):
        asyncio.run(collector.collect([GOOD], 2, ["key"]))
    release.set()
    world.assert_all_closed()


def test_a_broken_policy_raises_and_closes_what_was_opened(tokenizer):
    world = World(tokenizer, script=[])  # a script that has ended is an IndexError
    with pytest.raises(IndexError):
        world.collect(GOOD, GOOD)
    world.assert_all_closed()


# Reward functions of TRL's form.


def test_reward_functions_see_tool_calls_results_and_columns(tokenizer):
    seen: dict[str, Any] = {}

    def reward(prompts: list, completions: list, **columns: Any) -> list[float]:
        seen.update(columns, prompts=prompts, completions=completions)
        return [0.25, 0.5]

    (group,) = World(tokenizer, reward_functions=(reward,)).collect(GOOD)
    assert seen["prompts"] == [[{"role": "user", "content": "What is 2 + 3?"}]] * 2
    call, result, answer = seen["completions"][0]
    assert call["role"] == "assistant"
    assert call["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
    assert (result["role"], result["content"]) == ("tool", "5")
    assert (answer["role"], answer["content"]) == ("assistant", "It is 5.")
    assert seen["difficulty"] == [2, 2]
    assert [r.reward for r in group.rollouts] == [1.25, 1.5], "on top of the measures"


def test_reward_functions_see_open_environments_and_are_added_to_the_weighed_measures(tokenizer):
    seen: list[ScriptedEpisode] = []

    def reward(environments: list, **columns: Any) -> list[float]:
        assert [world.closed for world in environments] == [0, 0]
        seen.extend(environments)
        return [1.0, 2.0]

    environment = ScriptedEnvironment(reward_weights={"right": 0.5})
    functions = (reward, lambda **columns: [0.25, 0.25])
    world = World(tokenizer, environment=environment, reward_functions=functions)
    (group,) = world.collect(GOOD)
    assert [r.reward for r in group.rollouts] == [1.75, 2.75]
    assert seen == world.environment.episodes
    world.assert_all_closed()


def test_a_run_whose_reward_function_always_raises_is_stopped_and_its_episodes_are_closed(tokenizer):
    def rate(completions: list) -> list[float]:
        raise RuntimeError("no such column")

    world = World(tokenizer, reward_functions=(rate,))
    (group,) = world.collect(GOOD)
    assert [r.reward for r in group.rollouts] == [1.0, 1.0], "once is no reason to stop: the measures remain"
    with pytest.raises(UserCodeError, match="the reward function rate has failed in all of its 4 calls"):
        world.collect(GOOD, GOOD, GOOD)
    world.assert_all_closed()
