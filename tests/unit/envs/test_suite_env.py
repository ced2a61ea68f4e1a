import asyncio
import threading
from dataclasses import replace

import pytest

from palestra import Context, function_tool
from palestra.agents.agent import Agent
from palestra.core.errors import InputError, SettingError, UserCodeError
from palestra.core.types import Message
from palestra.envs.base import Environment
from palestra.envs.suite_env import SuiteEnvironment
from palestra.evals.measures import measure
from palestra.evals.suite import EvalSuite


@measure
def suite_env_right(ctx):
    return ctx.expect in ctx.final_assistant_message.text


def brief(ctx):
    return len(ctx.final_assistant_message.text) < 10


def broken(ctx):
    raise ValueError("oh")


def price(item: str) -> float:
    """Look a price up."""
    return 2.0


SUITE = EvalSuite.from_records([{"input": f"{i}?", "expect": str(i)} for i in range(4)], measures=[suite_env_right])
AGENT = Agent("clerk", "palestra/tiny", "Be brief.", [price])


def test_an_episode_opens_with_instructions_and_the_question_or_messages():
    environment: Environment = SuiteEnvironment(AGENT, SUITE)
    episode = environment.open(environment.problems("train")[2])
    assert list(episode.prompt) == [Message("system", "Be brief."), Message("user", "2?")]
    assert [tool.name for tool in episode.tools] == ["price"]
    assert asyncio.run(episode.reply(episode.prompt)) == ()
    episode.close()
    environment = SuiteEnvironment(Agent("clerk"), SUITE)
    assert [m.role for m in environment.open(SUITE.cases[0]).prompt] == ["user"], "no instructions, no system message"
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    suite = EvalSuite.from_records([{"input": history}], measures=[brief])
    prompt = SuiteEnvironment(AGENT, suite).open(suite.cases[0]).prompt
    assert [m.role for m in prompt] == ["system", "user", "assistant"]


def test_scores_come_from_every_measure_and_a_broken_one_scores_zero():
    environment = SuiteEnvironment(AGENT, SUITE, measures=["suite_env_right", brief, broken])
    episode = environment.open(SUITE.cases[3])
    scores = asyncio.run(episode.score([*episode.prompt, Message("assistant", "3")], []))
    assert [(s.value, s.error) for s in scores.values()] == [(1.0, False), (1.0, False), (0.0, True)]
    assert list(scores) == ["suite_env_right", "brief", "broken"]


def test_measures_run_at_once():
    all_run = threading.Barrier(10)

    def slow(name):
        def fn(ctx):
            all_run.wait(60)  # raises where the others do not come
            return True

        fn.__name__ = name
        return fn

    episode = SuiteEnvironment(AGENT, SUITE, measures=[slow(f"slow_{i}") for i in range(10)]).open(SUITE.cases[0])
    scores = asyncio.run(episode.score([], []))
    assert [score.value for score in scores.values()] == [1.0] * 10


def test_the_held_out_problems_are_those_of_the_held_out_suite():
    train, held_out = SUITE.split(0.5)
    environment = SuiteEnvironment(AGENT, train, held_out)
    assert list(environment.problems("held_out")) == list(held_out)
    assert list(SuiteEnvironment(AGENT, SUITE).problems("held_out")) == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, {"suite_env_right": 0.5, "brief": 0.5}),
        ([2, 1], {"suite_env_right": 2.0, "brief": 1.0}),
        ({"brief": 1}, {"suite_env_right": 0.0, "brief": 1.0}),
    ],
    ids=str,
)
def test_weights_may_be_left_out_listed_or_named(given, expected):
    environment = SuiteEnvironment(AGENT, SUITE, measures=[suite_env_right, brief], reward_weights=given)
    assert environment.reward_weights == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([1.0], "1 values for 2 measures"),
        ({"breif": 1.0}, "Did you mean 'brief'"),
        ([0, 0], "at least one that is not 0"),
        ([float("nan"), 1], "finite"),
    ],
    ids=str,
)
def test_wrong_weights_are_refused(given, words):
    with pytest.raises(SettingError, match=words):
        SuiteEnvironment(AGENT, SUITE, measures=[suite_env_right, brief], reward_weights=given)


@function_tool
def put(item: str, cart: Context[list]) -> int:
    """Put an item into the cart."""
    cart.append(item)
    return len(cart)


def test_every_attempt_has_a_context_of_its_own_which_measures_see():
    def full(ctx):
        return len(ctx.context) == 2

    records = [{"input": "Buy a mug.", "cart": ["lamp"]}]
    suite = EvalSuite.from_records(records, measures=[full], context_fn=lambda record: record["cart"])
    environment = SuiteEnvironment(Agent("a", "palestra/tiny", tools=[put]), *suite_and_held_out(suite))
    first, second = (environment.open(suite.cases[0]) for _ in range(2))
    assert first.tools[0](item="mug") == 2
    verdicts = [asyncio.run(episode.score([], [])) for episode in (first, second)]
    assert [v["full"].passed for v in verdicts] == [True, False]
    assert records[0]["cart"] == ["lamp"], "an attempt works on a copy of the record"


def suite_and_held_out(suite):
    """A held-out suite without a context_fn gets that of the other."""
    return suite, replace(suite, context_fn=None)


@pytest.mark.parametrize(
    ("agent", "measures", "words"),
    [
        (AGENT, (), r"(?s)no measures.*@measure"),
        (Agent("clerk", instructions=lambda c, a: "x"), [len], "Pass a string"),
        (Agent("a", tools=[put]), [len], r"tool 'put' takes a context, and.*context_fn=lambda record"),
    ],
    ids=["measures", "instructions", "context"],
)
def test_what_is_missing_is_named_with_the_remedy(agent, measures, words):
    with pytest.raises(InputError, match=words):
        SuiteEnvironment(agent, EvalSuite.from_records([{"input": "x"}], measures=measures))


def test_one_context_for_two_attempts_is_refused():
    shared: list = []
    suite = EvalSuite.from_records([{"input": "Buy."}], measures=[len], context_fn=lambda record: shared)
    environment = SuiteEnvironment(Agent("a", "palestra/tiny", tools=[put]), suite)
    environment.open(suite.cases[0])
    with pytest.raises(UserCodeError, match="context_fn gave the same object twice"):
        environment.open(suite.cases[0])


def test_a_tool_that_changes_what_all_attempts_share_is_warned_about(caplog):
    sold: list[str] = []

    def sell(item: str) -> str:
        """Sell an item."""
        sold.append(item)
        return item

    SuiteEnvironment(Agent("a", "palestra/tiny", tools=[sell]), SUITE)
    assert "tool sell changes sold, which all attempts share" in caplog.text
