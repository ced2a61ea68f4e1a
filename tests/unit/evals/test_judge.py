"""The judge against a real HTTP server on this machine."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from palestra.core import http
from palestra.core.errors import PalestraError
from palestra.core.types import Message, ToolCall
from palestra.evals.judge import judge, read_verdict
from palestra.evals.measures import MeasureContext, run_measure

CONTEXT = MeasureContext(
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
    return asyncio.run(run_measure(judge("m", "Be right.", base_url=endpoint.base_url, **options), CONTEXT, 20))


def test_the_judge_sees_rubric_expectation_and_conversation(endpoint, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    score = grade(endpoint, (200, 'Sure: {"score": 0.8, "reason": "close"}'), api_key_env="MY_KEY")
    assert (score.value, score.passed, score.reason, score.error) == (0.8, True, "close", False)
    path, authorization, body = endpoint.requests[0]
    assert (path, authorization, body["model"]) == ("/v1/chat/completions", "Bearer secret", "m")
    question = body["messages"][1]["content"]
    assert all(words in question for words in ("Be right.", "# Expected\n4", "user: 2 + 2?", '[calls add({"a": 2})]'))


def test_a_local_server_needs_no_key(endpoint, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert not grade(endpoint, (200, '{"score": 0.2}')).passed
    assert endpoint.requests[0][1] is None


def test_a_busy_server_is_asked_again(endpoint, monkeypatch):
    monkeypatch.setattr(http.time, "sleep", lambda seconds: None)
    assert grade(endpoint, (429, ""), (503, ""), (200, '{"score": 1}')).value == 1.0


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
    assert grade(endpoint).error


@pytest.mark.parametrize("text", ["", "good!", '{"score": 2}', '{"score": "1"}', '{"score": true}', "{broken}", "[1]"])
def test_an_answer_without_a_score_is_a_value_error(text):
    with pytest.raises(ValueError, match=r".+"):
        read_verdict(text)


def test_thinking_before_the_verdict_is_passed_over():
    assert read_verdict('<think>{"score": 0}?</think>\n```json\n{"score": 1, "reason": "ok"}\n```') == (1.0, "ok")


def test_openai_itself_needs_a_key_at_once(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(PalestraError, match="environment variable OPENAI_API_KEY"):
        judge("gpt-5", "Be right.")
