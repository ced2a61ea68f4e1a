"""Measures and judges."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from palestra.core import calls
from palestra.core.errors import PalestraError
from palestra.core.types import Message, Problem, Score, ToolCall, ToolResult
from palestra.evals.judge import judge, read_verdict
from palestra.evals.measures import (
    Measure,
    MeasureContext,
    as_measure,
    as_measures,
    fail_reason,
    get_measure,
    measure,
    pass_reason,
    run_measure,
)

CONTEXT = MeasureContext(
    messages=(
        Message("user", "2 + 2?"),
        Message("assistant", "", (ToolCall("call_0", "add", {"a": 2, "b": 2}),)),
        Message("tool", "4", tool_call_id="call_0"),
        Message("assistant", "It is 4."),
    ),
    tool_results=(ToolResult(ToolCall("call_0", "add"), "4"),),
    expect="4",
    case=Problem("sum-0", "2 + 2?", "4", {"input": "2 + 2?", "level": 1}),
)


def score(fn, timeout_s=5.0, **options) -> Score:
    return asyncio.run(run_measure(Measure("m", fn, **options), CONTEXT, timeout_s))


def test_the_context_shows_the_end_the_calls_and_the_record():
    assert CONTEXT.final_assistant_message.text == "It is 4."
    assert [call.name for call in CONTEXT.tool_calls] == ["add"]
    assert CONTEXT.case.row["level"] == 1


def test_without_an_assistant_message_the_final_one_is_empty():
    context = MeasureContext(messages=(Message("user", "hi"),))
    assert context.final_assistant_message == Message("assistant", "")
    assert context.tool_calls == ()


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (True, Score(1.0, True)),
        (False, Score(0.0, False)),
        (1, Score(1.0, True)),
        (0.4, Score(0.4, False)),
        (0.99, Score(0.99, False)),
        (1.0 - 1e-12, Score(1.0 - 1e-12, True)),
        (np.bool_(True), Score(1.0, True)),
        (np.float64(0.5), Score(0.5, False)),
        (np.float32(0.5), Score(0.5, False)),
        (pass_reason("good"), Score(1.0, True, "good")),
        (fail_reason("bad"), Score(0.0, False, "bad")),
    ],
    ids=repr,
)
def test_verdicts_become_scores(returned, expected):
    assert score(lambda ctx: returned) == expected


@pytest.mark.parametrize(
    "returned",
    [
        None,
        "yes",
        1.5,
        -0.1,
        math.nan,
        math.inf,
        ["a"],
        [math.nan],
        np.ones((2, 2)),
        Score(2.0, True),
        Score(math.nan, True),
    ],
    ids=repr,
)
def test_nonsense_is_an_error_on_record(returned):
    got = score(lambda ctx: returned)
    assert (got.value, got.passed, got.error) == (0.0, False, True)
    assert "measure m" in got.reason


def test_a_threshold_decides_what_passes():
    assert score(lambda ctx: 0.7, threshold=0.7).passed
    assert not score(lambda ctx: 0.69, threshold=0.7).passed


def test_async_measures_are_awaited():
    async def slow(ctx):
        await asyncio.sleep(0)
        return ctx.expect in ctx.final_assistant_message.text

    assert score(slow).passed


def test_a_measure_that_raises_scores_zero_and_says_why():
    got = score(lambda ctx: ctx.expect["missing"])
    assert (got.value, got.error) == (0.0, True)
    assert got.reason.startswith("measure m raised TypeError: ")


def test_a_measure_that_exits_or_hangs_ends_nothing():
    assert "raised SystemExit" in score(lambda ctx: sys.exit(1)).reason
    assert "took longer" in score(lambda ctx: time.sleep(1.0), timeout_s=0.02).reason


def test_an_interrupt_passes_through():
    def interrupted(ctx):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(interrupted)


def test_declared_measures_are_found_by_name():
    @measure
    def exactly_right(ctx):
        return True

    @measure("nearly right", threshold=0.5)
    def other(ctx):
        return 0.6

    assert get_measure("exactly_right") is exactly_right
    assert as_measure("nearly right").threshold == 0.5
    assert exactly_right(CONTEXT) is True


def test_an_unknown_name_is_answered_with_the_nearest():
    measure("the_right_answer")(lambda ctx: True)
    with pytest.raises(PalestraError, match=r"no measure 'the_right_anwser'\. Did you mean 'the_right_answer'\?"):
        get_measure("the_right_anwser")


def test_plain_functions_and_single_ones_will_do():
    def polite(ctx):
        return True

    assert [m.name for m in as_measures(polite)] == ["polite"]
    assert [m.name for m in as_measures([polite])] == ["polite"]


def test_two_measures_of_one_name_are_refused():
    with pytest.raises(PalestraError, match="two measures are named 'same'"):
        as_measures([Measure("same", bool), Measure("same", bool)])


def test_what_is_no_measure_is_refused():
    with pytest.raises(PalestraError, match="3 is not a measure"):
        as_measures([3])


@pytest.mark.parametrize("threshold", [0.0, 1.5])
def test_a_threshold_out_of_range_is_refused(threshold):
    with pytest.raises(PalestraError, match="threshold"):
        measure(threshold=threshold)


def test_a_reward_model_is_a_measure_and_its_values_may_be_any_number():
    class Taste:
        def calculate_combined_reward(self, output: str, expected_answer: str) -> float:
            return 2.5 if expected_answer in output else -1.0

    (taste,) = as_measures(Taste())
    assert taste.name == "Taste"
    ctx = MeasureContext([Message("assistant", "It is 5.")], expect="5")
    assert asyncio.run(run_measure(taste, ctx, 1.0)) == Score(2.5, True)
    assert asyncio.run(run_measure(taste, replace(ctx, expect="6"), 1.0)) == Score(-1.0, False)


def test_a_measure_for_which_there_is_no_thread_left_gets_no_score(monkeypatch):
    monkeypatch.setattr(calls, "MAX_HUNG_CALLS", -1)
    over = threading.Event()
    with pytest.raises(calls.OutOfThreads):
        score(lambda ctx: over.wait(30), timeout_s=0.1)
    over.set()


JUDGE_CONTEXT = MeasureContext(
    messages=(Message("user", "2 + 2?"), Message("assistant", "Four.", (ToolCall("c", "add", {"a": 2}),))), expect="4"
)


class Endpoint:
    """An OpenAI-style server that gives prepared answers and keeps what it was asked."""

    def __init__(self):
        self.answers: list[tuple[int, str]] = []
        self.requests: list[tuple[str, str | None, dict]] = []
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.requests.append((self.path, self.headers.get("Authorization"), body))
                status, text = endpoint.answers.pop(0)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps({"choices": [{"message": {"content": text}}]}).encode())

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.base_url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def endpoint():
    made = Endpoint()
    yield made
    made.server.shutdown()
    made.server.server_close()


def grade(endpoint: Endpoint, *answers: tuple[int, str], **options):
    endpoint.answers = list(answers)
    options = {"base_url": endpoint.base_url} | options
    return asyncio.run(run_measure(judge("m", "Be right.", **options), JUDGE_CONTEXT, 20))


def test_the_judge_sees_rubric_expectation_and_conversation(endpoint, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    score = grade(endpoint, (200, 'Sure: {"score": 0.8, "reason": "close"}'), api_key_env="MY_KEY")
    assert (score.value, score.passed, score.reason, score.error) == (0.8, True, "close", False)
    path, authorization, body = endpoint.requests[0]
    assert (path, authorization, body["model"]) == ("/v1/chat/completions", "Bearer secret", "m")
    question = body["messages"][1]["content"]
    assert all(words in question for words in ("Be right.", "# Expected\n4", "user: 2 + 2?", '[calls add({"a": 2})]'))


def test_the_judge_asks_where_openai_base_url_points(endpoint, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", endpoint.base_url)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert grade(endpoint, (200, '{"score": 1}'), base_url=None).passed
    assert endpoint.requests[0][0] == "/v1/chat/completions"


def test_a_local_server_needs_no_key(endpoint, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert not grade(endpoint, (200, '{"score": 0.2}')).passed
    assert endpoint.requests[0][1] is None


def test_a_busy_server_is_asked_again(endpoint):
    assert grade(endpoint, (429, ""), (503, ""), (200, '{"score": 1}'), retry_pause_s=0).value == 1.0


def test_a_refusal_is_an_error_on_record_without_the_key(endpoint, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    score = grade(endpoint, (401, "wrong key"), api_key_env="MY_KEY")
    assert score.error
    assert "answered 401" in score.reason
    assert "secret" not in score.reason
    assert len(endpoint.requests) == 1


def test_a_server_that_is_not_there_is_an_error_on_record(endpoint):
    endpoint.server.shutdown()
    endpoint.server.server_close()
    assert grade(endpoint, retry_pause_s=0).error


@pytest.mark.parametrize("text", ["", "good!", '{"score": 2}', '{"score": "1"}', '{"score": true}', "{broken}", "[1]"])
def test_an_answer_without_a_score_is_a_value_error(text):
    with pytest.raises(ValueError, match=r".+"):
        read_verdict(text)


def test_thinking_before_the_verdict_is_passed_over():
    assert read_verdict('<think>{"score": 0}?</think>\n```json\n{"score": 1, "reason": "ok"}\n```') == (1.0, "ok")


def test_openai_itself_needs_a_key_at_once(monkeypatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(PalestraError, match="environment variable OPENAI_API_KEY"):
        judge("gpt-5", "Be right.")
