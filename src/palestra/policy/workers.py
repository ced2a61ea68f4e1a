"""Processes of ours that sample with the policy of this one: rollout workers and gateway workers."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from typing import Any

from palestra.core import children
from palestra.core.channel import Channel, Handlers
from palestra.core.errors import PalestraError
from palestra.policy.channel import PolicyServer

_EXIT_S = 1.0  # between the end of the connection and the exit status


class WorkerProcess:
    """One process: a program, or a fork of this one. It ends when its channel is closed. `lost` says why it has ended
    by itself; its calls fail with that."""

    def __init__(self, process: Any, sock: socket.socket) -> None:
        self.process: children.Fork | subprocess.Popen[str] = process
        self.lost: PalestraError | None = None
        self.channel: Channel | None = None
        self.server: PolicyServer | None = None
        self.socket = sock

    def connect(self, server: PolicyServer, handlers: Handlers) -> Channel:
        """Serve the policy to the process from now on, in the running event loop."""
        self.server = server
        self.channel = server.channel = Channel(self.socket, {**server.handlers, **handlers}, self._ended)
        return self.channel

    def disconnect(self) -> None:
        if self.channel is not None and self.server is not None:
            self.channel.close(self.lost)
            self.server.close()
        self.socket.close()

    def end(self, patience_s: float = 0.0) -> None:
        """Kill the process, unless it ends in this time."""
        if self.lost is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience_s)
            children.end(self.process)

    def explain(self, status: int | None) -> PalestraError:
        """The error of what it had to do; `status` is None where only its connection has ended."""
        raise NotImplementedError

    def _ended(self) -> None:
        try:
            status = self.process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            status = None
        children.end(self.process)
        self.lost = self.explain(status)
        self.disconnect()
