"""Servers under attack: pages of other sites, silent and slow clients, too many of them, and what is logged of it."""

import asyncio
import contextlib
import logging
import queue
import resource
import socket
import time
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import pytest
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from palestra.core.errors import SettingError
from palestra.extras.agent_tools import RlTools, mcp_server
from palestra.extras.agent_tools.clients import Clients
from palestra.extras.agent_tools.locks import Site
from palestra.extras.atropos.protocol import ScoredGroup
from palestra.extras.atropos.server import trajectory_app
from palestra.runs.manager import RunManager
from palestra.servers import web
from palestra.servers.connections import Connections, LimitLines
from palestra.servers.openai.inference import SglangBody, inference_app
from palestra.servers.web import error_body, make_app, open_port, read_body, request_log


async def echo(request: Request) -> PlainTextResponse:
    return PlainTextResponse(str(len(await read_body(request, 1 << 20))))


def app(token: str | None = None):
    return make_app([Route("/", echo, methods=["GET", "POST"])], token=token)


def ask(headers: dict[str, str], method: str = "GET", token: str | None = None, path: str = "/") -> int:
    async def main() -> int:
        transport = httpx.ASGITransport(app(token))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return (await client.request(method, path, headers=headers)).status_code

    return asyncio.run(main())


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
        {"Origin": "http://127.0.0.1:3000", "Sec-Fetch-Site": "cross-site"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://[broken"},
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:80"},
    ],
)
def test_a_page_of_another_site_is_refused_whatever_it_sends(method, headers):
    assert ask(headers, method) == 403


def all_servers(folder):
    """The application of every server, with a path that changes or tells something."""
    clients = Clients(lambda: RlTools(RunManager(folder / "home"), Site()))
    model = SimpleNamespace(name="m", context_tokens=8, policy=None, eos=(0,))
    yield trajectory_app(folder / "wire"), "/reset_data"
    yield inference_app(model), "/v1/completions"
    tools = mcp_server.http_app(clients, None)
    yield tools, "/tools/rl_list_runs"
    yield tools, "/mcp"


def test_every_server_refuses_pages_of_other_sites(tmp_path):
    async def statuses(application, path) -> set[int]:
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            pages = [{"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"Origin": "null"}]
            pages += [{"Origin": "https://evil.example"}, {"Host": "evil.example"}]
            asked = [client.request(method, path, headers=page) for page in pages for method in ("GET", "POST")]
            return {(await each).status_code for each in asked}

    for application, path in all_servers(tmp_path):
        assert asyncio.run(statuses(application, path)) == {403}, path


@pytest.mark.parametrize(
    "headers", [{}, {"Host": "localhost:8000"}, {"Host": "[::1]:1"}, {"Origin": "http://localhost:3000"},
                {"Sec-Fetch-Site": "none"}, {"Sec-Fetch-Site": "same-origin"}]
)  # fmt: skip
def test_programs_and_local_pages_are_answered(headers):
    assert ask(headers) == 200


def test_a_token_that_is_empty_or_cannot_be_sent_is_refused_at_the_start():
    for token in ("", "schlüssel", " padded", "line\n"):
        with pytest.raises(SettingError, match="the token is"):
            open_port("127.0.0.1", 0, token)
    open_port("127.0.0.1", 0, "s3cret-!").close()
    assert ask({"Host": "evil.example"}, token="") == 403, "no token is no permission"
    assert ask({}, token="right") == 401
    assert ask({"Authorization": "Bearer right"}, token="right") == 200


def connect(url: str, text: bytes = b"") -> socket.socket:
    parts = urlsplit(url)
    client = socket.create_connection((parts.hostname, parts.port), timeout=10)
    client.sendall(text)
    return client


def is_closed_within(client: socket.socket, seconds: float) -> bool:
    client.settimeout(seconds)
    try:
        while client.recv(4096):
            pass
    except OSError as error:
        return not isinstance(error, TimeoutError)
    return True


def test_half_sent_headers_are_timed_out_however_slowly_they_come(serve, monkeypatch):
    monkeypatch.setattr("palestra.servers.connections._GRACE_S", 0.05)
    url = serve(app(), limits=Connections(64, 64, headers_s=0.3))
    silent, slow = connect(url), connect(url, b"GET / HTTP/1.1\r\n")
    until = time.monotonic() + 0.4
    while time.monotonic() < until:
        try:
            slow.sendall(b"X-A: b\r\n")
        except ConnectionError:
            break
        time.sleep(0.05)
    assert is_closed_within(silent, 5)
    assert is_closed_within(slow, 5)


def test_headers_without_end_are_refused_before_they_fill_the_memory(serve):
    client = connect(serve(app()), b"GET / HTTP/1.1\r\n")
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < 1 << 22:
            sent += client.send(b"X-A: " + b"b" * 4000 + b"\r\n")
    assert sent < 1 << 22
    assert is_closed_within(client, 5)


def test_a_client_that_goes_away_cancels_what_was_done_for_it(serve):
    ends = queue.Queue()

    async def work():
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            ends.put("cancelled")
            raise

    async def slow(request):
        await read_body(request, 100)
        await web.while_connected(request, work())

    url = serve(make_app([Route("/", slow, methods=["POST"])]))
    connect(url, b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc").close()
    assert ends.get(timeout=5) == "cancelled"


def test_silent_connections_make_room_for_clients_that_ask(serve):
    url = serve(app(), limits=Connections(8, 64))
    silent = [connect(url) for _ in range(40)]
    assert [httpx.get(url).status_code for _ in range(5)] == [200] * 5
    assert is_closed_within(silent[0], 5)
    limits = Connections.within_file_limit()
    assert limits.limit + limits.backlog < resource.getrlimit(resource.RLIMIT_NOFILE)[0], "files are left for the rest"


def test_a_body_that_stops_in_the_middle_is_refused(serve, monkeypatch):
    monkeypatch.setattr(web, "_SILENCE_S", 1)
    client = connect(serve(app()), b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nabc")
    assert b" 408 " in client.recv(4096)


def test_a_client_that_dies_in_mid_post_leaves_no_traceback(serve, caplog):
    url = serve(app())
    for _ in range(5):
        connect(url, b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\nabc").close()
    assert httpx.post(url, content=b"abc").text == "3"
    time.sleep(0.1)
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]
    for name in ("asyncio", "uvicorn.error"):  # and lines that clients cause are limited
        assert any(isinstance(each, LimitLines) for each in logging.getLogger(name).filters)


def test_what_clients_can_cause_without_end_is_logged_so_many_times_a_minute(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("palestra.servers.connections.monotonic", lambda: now[0])
    limit, passed = LimitLines(3), []

    def log(text: str) -> None:
        record = logging.LogRecord("asyncio", logging.ERROR, "", 0, text, (), None)
        if limit.filter(record):
            passed.append(record.getMessage())

    for _ in range(1000):
        log("too many open files")
    now[0] = 61.0
    log("too many open files")
    assert passed == ["too many open files"] * 3 + ["too many open files (997 lines were left out before)"]


def test_a_request_is_one_line_without_control_characters(caplog):
    with caplog.at_level(logging.INFO, logger=request_log.name):
        ask({})
        ask({}, path="/%1b[31m" + "x" * 5000)
    first, second = (record.getMessage() for record in caplog.records if record.name == request_log.name)
    assert first.startswith("GET / 200 ")
    assert second.startswith("GET /\\x1b[31mxxx")
    assert len(second) < 300


def test_a_body_of_nothing_but_mistakes_is_refused_at_the_first_of_each_row_and_not_repeated():
    assert len(error_body(400, "x" * 10**6)["error"]["message"]) < 3000
    wrong = ["x"] * 10_000
    bodies = {
        ScoredGroup: {"tokens": [wrong] * 10, "masks": [wrong], "scores": wrong},
        SglangBody: {"input_ids": [[5]] * 10_000},
    }
    for form, sent in bodies.items():
        with pytest.raises(ValidationError) as error:
            form.model_validate(sent)
        assert error.value.error_count() < 10
