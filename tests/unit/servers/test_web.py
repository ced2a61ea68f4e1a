"""The server's end: requests in flight are answered, and nothing is printed about them."""

import asyncio
import logging
import socket

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from palestra.cli import serve as cli_serve
from palestra.servers.web import Server, make_app, open_port, url_of


async def hang(request: Request) -> Response:
    await asyncio.sleep(60)
    return Response("late")


async def stream_and_hang(request: Request) -> Response:
    async def pieces():
        yield b"first"
        await asyncio.sleep(60)

    return StreamingResponse(pieces())


async def end_while_asked(path: str) -> httpx.Response:
    server = Server(make_app([Route("/hang", hang), Route("/stream", stream_and_hang)]), grace_s=0)
    socket = open_port("127.0.0.1", 0, None)
    serving = asyncio.create_task(server.serve(sockets=[socket]))
    while not server.started:
        await asyncio.sleep(0.01)
    async with httpx.AsyncClient(base_url=url_of(socket), timeout=20, trust_env=False) as client:
        asking = asyncio.create_task(client.get(path))
        while not server.server_state.tasks:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        server.should_exit = True
        response = await asking
    await serving
    return response


@pytest.mark.parametrize(("path", "status"), [("/hang", 503), ("/stream", 200)])
def test_requests_in_flight_are_answered_when_the_server_ends_and_no_error_is_logged(path, status, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        response = asyncio.run(end_while_asked(path))
    assert response.status_code == status
    assert ("shutting down" in response.text) == (status == 503)
    logged = [record.getMessage() for record in caplog.records]
    assert [text for text in logged if "AsyncClient.aclose" not in text] == []  # of clients of earlier tests


def test_who_has_read_the_address_of_a_server_can_connect(monkeypatch) -> None:
    sock = open_port("127.0.0.1", 0, None)
    connected = []

    def echo(line: str) -> None:
        with socket.create_connection(sock.getsockname(), timeout=5):
            connected.append(line)
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_serve.click, "echo", echo)
    with sock, pytest.raises(KeyboardInterrupt):
        cli_serve.run_server(make_app([]), sock, "it is at")
    assert connected[0].startswith("it is at http://127.0.0.1:")
