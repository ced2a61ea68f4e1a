"""A connection between the first rank and each other one, open as long as both live: the death of a process is noticed
at once, whatever the others are waiting for, and requests to stop and reasons of failures reach all."""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

_BACKLOG = 4096
_MAX_LINE = 100_000
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # seconds, seconds, times


class Liveness:
    """`on_lost` is called with a reason, `on_stop` without, both in a thread of this one."""

    def __init__(self, rank: int, on_lost: Callable[[str], None], on_stop: Callable[[], None]) -> None:
        self._rank = rank
        self._on_lost, self._on_stop = on_lost, on_stop
        self._peers: list[socket.socket] = []
        self._lock = threading.Lock()

    def listen(
        self, host: str, size: int, loopback: bool, timeout_s: float
    ) -> tuple[dict[str, Any], Callable[[], None]]:
        """On the first rank: where the others find it, and what waits for them all."""
        server = socket.create_server(("127.0.0.1" if loopback else "", 0), backlog=_BACKLOG)
        address = {"host": host, "port": server.getsockname()[1], "token": secrets.token_urlsafe(16)}

        def accept() -> None:
            server.settimeout(timeout_s)
            while len(self._peers) < size - 1:
                peer, _ = server.accept()
                peer.settimeout(timeout_s)
                lines = peer.makefile("rb")
                hello = _read_line(lines)
                if hello.get("token") == address["token"]:
                    self._follow(peer, lines, f"rank {hello['rank']} (process {hello['pid']} on {hello['host']})")
            server.close()

        return address, accept

    def connect(self, address: dict[str, Any], timeout_s: float) -> None:
        """On any other rank."""
        peer = socket.create_connection((address["host"], address["port"]), timeout_s)
        hello = {"token": address["token"], "rank": self._rank, "pid": os.getpid(), "host": socket.gethostname()}
        _send(peer, hello)
        self._follow(peer, peer.makefile("rb"), "rank 0")

    def broadcast(self, **message: Any) -> None:
        """Send to all that are connected."""
        with self._lock:
            for peer in self._peers:
                _send(peer, message)

    def _follow(self, peer: socket.socket, lines: Any, who: str) -> None:
        peer.settimeout(None)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # for a machine that is gone
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._peers.append(peer)
        threading.Thread(target=self._read, args=(lines, who), daemon=True, name="liveness").start()

    def _read(self, lines: Any, who: str) -> None:
        while message := _read_line(lines):
            if "stop" in message:
                self._on_stop()
            elif "failed" in message:
                self._on_lost(str(message["failed"]))
        self._on_lost(
            f"{who} ended without a word; it was killed (by the system, if memory ran out), or its machine is gone"
        )


def _send(peer: socket.socket, message: dict[str, Any]) -> None:
    try:
        peer.sendall(json.dumps(message).encode() + b"\n")
    except OSError:  # it is gone, which its own thread notices
        return


def _read_line(lines: Any) -> dict[str, Any]:
    """Empty at the end, or where something else talks to the port."""
    try:
        return dict(json.loads(lines.readline(_MAX_LINE) or b"{}"))
    except (OSError, ValueError, TypeError):
        return {}
