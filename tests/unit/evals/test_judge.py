"""Judges: rubrics, criteria, rankings, limits, caches, and what a failed call is."""

from __future__ import annotations

import asyncio
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response
from tests.support.judge_server import attempts_of, ranks, stub_model

from palestra.core.chat_model import CallLimits, ChatModel, Pace, hosting, logging_calls
from palestra.core.errors import PalestraError, RolloutError, SettingError
from palestra.core.types import Message, Problem, Rollout, Score, ToolCall
from palestra.evals.judge import judge, read_verdict, ruler
from palestra.evals.measures import Measure, MeasureContext, measure, run_group_measure, run_measure
from palestra.evals.rollout_stats import length_metrics
from palestra.rollout.local_models import LocalModels

FAST = {"retry_pause_s": 0.0}
CALLED = MeasureContext(
    (Message("user", "2 + 2?"), Message("assistant", "Four.", (ToolCall("c", "add", {"a": 2}),))), expect="4"
)


def context(answer: str, **row: Any) -> MeasureContext:
    messages = (Message("system", "You add."), Message("user", "2 + 2?"), Message("assistant", answer))
    return MeasureContext(messages, (), "4", Problem("sum", "2 + 2?", "4", row))


def grade(m: Measure, *contexts: MeasureContext) -> list[Score]:
    return asyncio.run(run_group_measure(m, contexts, 20))


def by_length(question: str) -> str:
    texts = attempts_of(question)
    return ranks([round(len(text) / max(map(len, texts)), 2) for text in texts])


def test_the_judge_sees_rubric_expectation_and_conversation_and_gets_its_key(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    with stub_model(lambda question: 'Sure: {"score": 0.8, "reason": "close"}') as stub:
        (score,) = grade(judge("m", "Be right.", base_url=stub.base_url, api_key_env="MY_KEY"), CALLED)
    assert (score.value, score.passed, score.reason, score.error) == (0.8, True, "close", False)
    assert (stub.paths, stub.keys, stub.bodies[0]["model"]) == (["/v1/chat/completions"], ["Bearer secret"], "m")
    words = ("Be right.", "# Expected\n4", "user: 2 + 2?", '[calls add({"a": 2})]')
    assert all(word in stub.questions[0] for word in words)


def test_the_judge_asks_where_openai_base_url_points_and_a_local_server_needs_no_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with stub_model(lambda question: '{"score": 0.2}') as stub:
        monkeypatch.setenv("OPENAI_BASE_URL", stub.base_url)
        (score,) = grade(judge("m", "Be right."), CALLED)
    assert (score.error, score.passed, stub.paths, stub.keys) == (False, False, ["/v1/chat/completions"], [None])
    monkeypatch.delenv("OPENAI_BASE_URL")
    with pytest.raises(SettingError, match="environment variable OPENAI_API_KEY"):
        judge("gpt-5", "Be right.")


def test_half_an_emoji_in_a_judges_reason_is_replaced(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    with stub_model(lambda question: '{"score": 1, "reason": "\\ud800"}') as stub:
        (score,) = grade(judge("m", "Be right.", base_url=stub.base_url, api_key_env="MY_KEY"), CALLED)
    assert (score.value, score.reason) == (1.0, "?")


def test_a_refusal_is_an_error_on_record_without_the_key_and_is_not_asked_again(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    with stub_model(lambda question: 401) as stub:
        m = judge("m", "Be right.", base_url=stub.base_url, api_key_env="MY_KEY", **FAST)
        (score,) = grade(m, CALLED)
    assert score.error
    assert "answered 401" in score.reason
    assert "secret" not in score.reason
    assert len(stub.bodies) == 1
    (gone,) = grade(m, CALLED)
    assert gone.error, "nor is a server that is not there a verdict"


@pytest.mark.parametrize("text", ["", "good!", '{"score": 2}', '{"score": "1"}', '{"score": true}', "{broken}", "[1]"])
def test_an_answer_without_a_score_is_a_value_error(text):
    with pytest.raises(ValueError, match=r".+"):
        read_verdict(text)
    thought = '<think>{"score": 0}?</think>\n```json\n{"score": 1, "reason": "ok"}\n```'
    assert read_verdict(thought) == (1.0, "ok"), "what was thought before is passed over"


def test_ruler_ranks_a_group_in_one_call_and_sends_the_shared_beginning_once():
    with stub_model(by_length) as stub:
        scores = grade(ruler("m", base_url=stub.base_url), context("4"), context("It is 4."), context("4"))
    assert len(stub.bodies) == 1
    question = stub.questions[0]
    assert question.count("2 + 2?") == question.count("You add.") == 1
    assert sorted(attempts_of(question)) == ["assistant: 4", "assistant: It is 4."]  # equal ones are sent once
    assert [s.value for s in scores] == [scores[0].value, 1.0, scores[0].value]
    assert scores[1].passed
    assert scores[1].reason == "1"


def test_ruler_shows_attempts_in_the_same_order_whoever_is_first():
    with stub_model(by_length) as stub:
        for answers in (("a", "bb", "ccc"), ("ccc", "a", "bb")):
            grade(ruler("m", base_url=stub.base_url, cache=False), *map(context, answers))
    assert attempts_of(stub.questions[0]) == attempts_of(stub.questions[1])


def test_a_ranking_that_leaves_an_attempt_out_is_asked_for_again_and_then_no_verdict():
    with stub_model(lambda question: ranks([1.0])) as stub:
        scores = grade(ruler("m", base_url=stub.base_url), context("4"), context("5"))
    assert len(stub.bodies) == 2
    assert all(score.error for score in scores)


def test_rubric_and_criteria_come_from_the_case():
    verdict = json.dumps({"criteria": {"1": 1, "2": 0.5}, "reason": "fine"})
    of_case = {"rubric": lambda case: case["rubric"], "criteria": lambda case: case["criteria"]}
    with stub_model(lambda question: verdict) as stub:
        m = judge("m", **of_case, base_url=stub.base_url)
        rows = [{"criterion": "names a number", "weight": 3}, {"criterion": "is brief", "points": 1}]
        (score,) = grade(m, context("4", rubric="Sums only.", criteria=rows))
    assert "Sums only." in stub.questions[0]
    assert "1. names a number\n2. is brief" in stub.questions[0]
    assert score.value == pytest.approx((3 * 1 + 1 * 0.5) / 4)
    assert "names a number 1" in score.reason


def test_a_negative_weight_takes_away_and_the_score_stays_in_bounds():
    verdict = json.dumps({"criteria": {"1": 0, "2": 1}})
    with stub_model(lambda question: verdict) as stub:
        (score,) = grade(judge("m", criteria={"right": 2, "insults": -4}, base_url=stub.base_url), context("4"))
    assert score.value == 0.0
    assert not score.error


@pytest.mark.parametrize("criteria", [{}, {"a": 0}, [3], {"a": -1}])
def test_criteria_without_positive_weight_are_rejected(criteria: Any) -> None:
    with pytest.raises(PalestraError, match="criteri"):
        judge("m", criteria=criteria, base_url="http://127.0.0.1:9/v1")


@pytest.mark.parametrize(
    ("limits", "word"),
    [
        ({"at_once": 3}, "max_concurrent"),
        ({"max_concurrent": 0}, "max_concurrent"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"max_cost": 1}, "price_in"),
    ],
)
def test_wrong_limits_are_rejected_by_name(limits: dict[str, Any], word: str) -> None:
    with pytest.raises(SettingError, match=word):
        ruler("m", base_url="http://127.0.0.1:9/v1", **limits)


def test_equal_questions_are_asked_once_also_while_the_first_is_on_its_way():
    with stub_model(lambda question: '{"score": 1}', delay_s=0.05) as stub:
        m = judge("m", "Right?", base_url=stub.base_url)

        async def several() -> list[Score]:
            return await asyncio.gather(*(run_measure(m, context("4"), 20) for _ in range(4)))

        assert all(score.passed for score in asyncio.run(several()))
        assert grade(m, context("4"))[0].passed
    assert len(stub.bodies) == 1


def test_a_cache_file_serves_the_next_run(tmp_path: Path):
    file = tmp_path / "judge.jsonl"
    with stub_model(lambda question: '{"score": 1, "reason": "yes"}') as stub:
        for _ in range(2):
            assert grade(judge("m", "Right?", base_url=stub.base_url, cache=file), context("4"))[0].reason == "yes"
    assert len(stub.bodies) == 1


def test_no_more_requests_are_in_flight_than_allowed():
    with stub_model(lambda question: '{"score": 1}', delay_s=0.02) as stub:
        m = judge("m", "Right?", base_url=stub.base_url, max_concurrent=3)
        scores = grade(m, *(context(str(i)) for i in range(12)))
    assert len(stub.bodies) == 12
    assert all(not score.error for score in scores)
    assert stub.most_in_flight <= 3


def test_the_pace_spreads_requests_after_the_first_minute():
    pace = Pace(per_minute=6)
    assert [pace.wait_s(1, now=100.0) for _ in range(8)] == [0] * 6 + [10.0, 20.0]
    assert pace.wait_s(1, now=1000.0) == 0.0  # a pause is not saved up beyond one minute
    assert [pace.wait_s(1, now=1000.0) for _ in range(6)][-1] == 10.0


def test_a_spent_budget_is_no_verdict_and_says_which_limit():
    with stub_model(lambda question: '{"score": 1}') as stub:
        m = judge("m", "Right?", base_url=stub.base_url, max_calls=2, max_concurrent=1)
        scores = grade(m, *(context(str(i)) for i in range(4)))
    assert [score.error for score in scores] == [False, False, True, True]
    assert "max_calls=2" in scores[2].reason
    assert len(stub.bodies) == 2


def test_cost_counts_reported_tokens_and_ends_the_budget():
    with stub_model(lambda question: '{"score": 1}') as stub:
        m = judge("m", "?", base_url=stub.base_url, price_in=1000, price_out=10_000, max_cost=0.3, max_concurrent=1)
        with logging_calls() as calls:
            scores = grade(m, *(context(str(i)) for i in range(3)))
    assert [score.error for score in scores] == [False, False, True]  # 0.2 a call
    assert calls.counts == pytest.approx({"judge/calls": 2, "judge/tokens": 220, "judge/cost": 0.4, "judge/errors": 1})
    assert calls.judges == {"judge"}


BROKEN: dict[str, Any] = {
    "429": 429,
    "500": 500,
    "not a chat answer": Response('{"choices": []}', media_type="application/json"),
    "not JSON": Response("<html>"),
    "no verdict in the text": "I like it.",
    "invalid JSON in the text": '{"score": ',
}


@pytest.mark.parametrize("answer", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("make", [judge, ruler])
def test_a_failed_call_is_no_verdict(make: Any, answer: Any) -> None:
    with stub_model(lambda question: answer) as stub:
        scores = grade(make("m", "Right?", base_url=stub.base_url, attempts=2, **FAST), context("4"), context("5"))
    assert all(score.error and score.passed is not True for score in scores)


def test_a_judge_that_does_not_answer_in_time_is_no_verdict():
    with stub_model(lambda question: '{"score": 1}', delay_s=0.5) as stub:
        m = judge("m", "Right?", base_url=stub.base_url, timeout_s=0.05, attempts=2, **FAST)
        (score,) = grade(m, context("4"))
    assert score.error
    assert "no answer within 0.05 s" in score.reason
    assert len(stub.bodies) == 2


def test_a_failed_call_is_not_cached_and_a_busy_server_is_asked_again():
    answers = [503, '{"score": 1}', 429, 503, '{"score": 1}']
    with stub_model(lambda question: answers.pop(0)) as stub:
        m = judge("m", "Right?", base_url=stub.base_url, attempts=1)
        assert grade(m, context("4"))[0].error
        assert grade(m, context("4"))[0].passed
        assert grade(judge("m", "Right?", base_url=stub.base_url, **FAST), context("4"))[0].passed


def test_a_model_of_this_process_judges_only_where_there_is_one():
    hello = [{"role": "user", "content": "Hi"}]
    with hosting(LocalModels()):
        model = ChatModel("palestra/tiny", purpose="judge", max_new_tokens=4)
        assert isinstance(asyncio.run(model.ask(hello, str)), str)
        assert model.usage.completion_tokens > 0
        (score,) = grade(judge("policy", "Right?"), context("4"))
    assert score.error
    assert "in training" in score.reason
    with pytest.raises(RolloutError, match="base_url"):
        asyncio.run(ChatModel("local/x", purpose="judge").ask(hello, str))


def test_a_chat_model_travels_to_another_process():
    model = ChatModel("m", "http://127.0.0.1:9/v1", purpose="judge", limits=CallLimits(max_calls=3))
    assert pickle.loads(pickle.dumps(model)).model == "m"


def test_a_group_measure_of_ones_own_sees_all_attempts():
    @measure("longest", group=True)
    def longest(contexts: Any) -> list[bool]:
        lengths = [len(c.final_assistant_message.text) for c in contexts]
        return [length == max(lengths) for length in lengths]

    assert [s.value for s in grade(longest, context("4"), context("four"))] == [0.0, 1.0]
    short = Measure("short", lambda contexts: [1.0], group=True)
    assert all("for 2 attempts" in s.reason and s.error for s in grade(short, context("4"), context("5")))


def rollout(answer: str, value: float, error: bool = False) -> Rollout:
    scores = {"ruler": Score(value, None, error=error)}
    return Rollout("p", (), (Message("assistant", answer),), "answered", scores=scores)


def test_length_correlation_is_of_siblings_with_a_verdict():
    metrics = length_metrics([rollout("a", 0.1), rollout("aaaa", 0.9), rollout("a" * 99, 0.0, error=True)], {"ruler"})
    assert metrics == {"judge/length_correlation/ruler": pytest.approx(1.0), "judge/length_groups/ruler": 1.0}
    assert length_metrics([rollout("a", 0.5), rollout("aaaa", 0.5)], {"ruler"}) == {}
