"""A served application on a free loopback port, in a thread that ends with the module."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from palestra.serve.web import Server, open_port, url_of


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., str]]:
    """Call it with an app to get its URL."""
    running: list[tuple[Server, threading.Thread]] = []

    def start(app) -> str:
        server, sock = Server(app), open_port("127.0.0.1", 0, None)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])), daemon=True)
        thread.start()
        running.append((server, thread))
        while not server.started:
            time.sleep(0.01)
        return url_of(sock)

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()
