"""The HTTP client against a real server on this machine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from palestra.core import http
from palestra.core.http import ConcurrencyLimit, HttpError, Request, Retries, ask, ask_async

NO_SERVER = "http://127.0.0.1:9/x"


class Server:
    """Gives prepared answers (status, headers, body) and keeps what it was asked; without one it stays silent."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, dict[str, str], bytes]] = []
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.hung_up = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                server.requests.append((self.command, self.path, dict(self.headers)))
                if not server.answers:
                    self.connection.settimeout(20)
                    if not self.rfile.read(1):  # the end of the stream: the client has closed it
                        server.hung_up.set()
                    return
                status, headers, body = server.answers.pop(0)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server():
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


@pytest.fixture(params=["sync", "async"])
def ask_either(request):
    """Both forms of `ask`, which must not differ."""
    return ask if request.param == "sync" else lambda *given: asyncio.run(ask_async(*given))


@pytest.fixture
def pauses(monkeypatch):
    """The pauses between attempts, which are not waited for."""
    made: list[float] = []
    here, wait, wait_async = threading.current_thread(), time.sleep, asyncio.sleep

    def sleep(seconds: float) -> None:  # threads of earlier tests may sleep, too
        made.append(seconds) if threading.current_thread() is here else wait(seconds)

    async def sleep_async(seconds: float, *result: object) -> object:  # and so may their servers
        if threading.current_thread() is not here:
            return await wait_async(seconds, *result)
        return made.append(seconds)

    monkeypatch.setattr(http.time, "sleep", sleep)
    monkeypatch.setattr(http.asyncio, "sleep", sleep_async)
    return made


def test_body_token_and_headers_arrive_and_the_answer_is_json(server, ask_either):
    server.answers = [(200, {}, b'{"a": 1}')]
    request = Request(f"{server.url}/x?y=1", {"b": 2}, token="t", headers={"Idempotency-Key": "k"})
    assert ask_either(request, Retries(attempts=1)) == {"a": 1}
    method, path, headers = server.requests[0]
    assert (method, path) == ("POST", "/x?y=1")
    assert (headers["Authorization"], headers["Idempotency-Key"]) == ("Bearer t", "k")


def test_busy_server_is_asked_again_after_growing_pauses_or_as_it_says(server, ask_either, pauses):
    server.answers = [(503, {}, b""), (429, {"Retry-After": "7"}, b""), (500, {}, b""), (200, {}, b"[]")]
    assert ask_either(Request(server.url), Retries(attempts=4, backoff=2.0)) == []
    assert pauses == [1.0, 7.0, 4.0]


def test_last_attempt_raises_with_url_status_and_text_and_a_refusal_is_not_repeated(server, ask_either, pauses):
    server.answers = [(503, {}, b"first"), (503, {}, b"no room"), (403, {}, b"not you")]
    with pytest.raises(HttpError, match=rf"{server.url}/x answered 503: no room") as caught:
        ask_either(Request(f"{server.url}/x"), Retries(attempts=2))
    assert caught.value.status == 503
    pauses.clear()
    with pytest.raises(HttpError, match="answered 403: not you"):
        ask_either(Request(server.url), Retries())
    assert pauses == []


def test_unreachable_server_is_told_with_the_reason_of_the_operating_system(ask_either):
    with pytest.raises(HttpError, match=rf"{NO_SERVER} could not be asked: .*Errno 111") as caught:
        ask_either(Request(NO_SERVER), Retries(unreachable_s=0))
    assert caught.value.status is None


def test_time_limits_of_busy_and_unreachable_are_apart(server, ask_either, pauses):
    with pytest.raises(HttpError):
        ask_either(Request(NO_SERVER), Retries(busy_s=float("inf"), unreachable_s=0))
    server.answers = [(503, {}, b""), (200, {}, b"1")]
    assert ask_either(Request(server.url), Retries(busy_s=60, unreachable_s=0)) == 1
    server.answers = [(503, {}, b"")]
    with pytest.raises(HttpError):
        ask_either(Request(server.url), Retries(busy_s=0, unreachable_s=float("inf")))


def test_answer_that_is_too_long_or_not_json_is_an_error(server, ask_either):
    server.answers = [(200, {}, b'"' + b"x" * 5000 + b'"'), (200, {}, b"<html>")]
    with pytest.raises(HttpError, match="more than 4,000 bytes"):
        ask_either(Request(server.url, max_bytes=4000), Retries())
    with pytest.raises(HttpError, match="answered 200: its answer is not JSON"):
        ask_either(Request(server.url), Retries())


def test_silent_server_is_given_up_after_the_timeout(server, ask_either):
    with pytest.raises(HttpError, match=r"no answer within 0\.2 s"):
        ask_either(Request(server.url, timeout_s=0.2), Retries(attempts=1))


@pytest.mark.parametrize("url", ["no-url", "http://[::1", "ftp://host/x"])
def test_bad_url_is_an_error_that_names_it(url, ask_either):
    with pytest.raises(HttpError) as caught:
        ask_either(Request(url), Retries(attempts=1))
    assert str(caught.value).startswith(f"{url} could not be asked: ")


def test_redirect_is_followed_without_a_key_and_refused_with_one(server, ask_either):
    moved = (302, {"Location": f"{server.url}/there"}, b"")
    server.answers = [moved, (200, {}, b"1")]
    assert ask_either(Request(server.url), Retries(attempts=1)) == 1
    server.answers = [moved, (200, {}, b"1")]
    with pytest.raises(HttpError, match=f"answered 302: it redirects to {server.url}/there"):
        ask_either(Request(server.url, token="t"), Retries(attempts=1))
    assert len(server.requests) == 3


def test_proxy_of_the_environment_is_not_used_for_loopback(server, ask_either, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    server.answers = [(200, {}, b"1")]
    assert ask_either(Request(server.url), Retries(attempts=1)) == 1


def test_cancelling_closes_the_connection(server):
    async def cancelled() -> None:
        task = asyncio.create_task(ask_async(Request(server.url), Retries()))
        while not server.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert server.hung_up.wait(10)


def test_no_more_requests_than_the_limit_are_under_way_in_each_event_loop():
    limit = ConcurrencyLimit(2)

    async def count() -> int:
        running = most = 0

        async def one() -> None:
            nonlocal running, most
            async with limit.slot():
                running += 1
                most = max(most, running)
                await asyncio.sleep(0.01)
                running -= 1

        await asyncio.gather(*(one() for _ in range(6)))
        return most

    assert [asyncio.run(count()), asyncio.run(count())] == [2, 2]


def test_httpx_is_not_loaded_before_the_first_request():
    code = "import sys, palestra.core.http, palestra.cli.main; sys.exit('httpx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
