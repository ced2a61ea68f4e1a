"""Processes of ours that sample with the policy of this one: rollout workers and gateway workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import traceback
from collections.abc import Callable
from typing import Any

from palestra.core import children
from palestra.core.channel import Channel, Handlers, LogToChannel
from palestra.core.errors import PalestraError
from palestra.policy.channel import ChannelPolicy, PolicyServer

_EXIT_S, _LOOK_S = 1.0, 0.01  # between the end of the connection and the exit status, and how often it is looked for
_OF_TOKENIZER = ("chat_template", "clean_up_tokenization_spaces", "extra_special_tokens")
_OF_PARSER = ("response_schema", "response_template")

log = logging.getLogger("palestra")


class WorkerProcess:
    """One process: a program, or a fork of this one. It ends when its channel is closed. `lost` says why it has ended
    by itself; its calls fail with that."""

    def __init__(self, process: Any, sock: socket.socket) -> None:
        self.process: children.Fork | subprocess.Popen[str] = process
        self.lost: PalestraError | None = None
        self.channel: Channel | None = None
        self.server: PolicyServer | None = None
        self.socket = sock

    def connect(self, server: PolicyServer, handlers: Handlers, *start: Any) -> Channel:
        """Serve the policy to the process from now on, in the running event loop; its work starts with these values."""
        handlers = {"log": log_record, **server.handlers, **handlers}
        self.server = server
        self.channel = server.channel = Channel(self.socket, handlers, self._ended)
        self.channel.send("start", *start)
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

    def explain(self, how: str) -> PalestraError:
        """The error of the calls of a process that ended in this way."""
        raise NotImplementedError

    def _ended(self, patience_s: float = _EXIT_S) -> None:
        """Its connection has ended: fail its calls as soon as it has an exit status, or does not end."""
        status = self.process.poll()
        if status is None and patience_s > 0:
            asyncio.get_running_loop().call_later(_LOOK_S, self._ended, patience_s - _LOOK_S)
            return
        children.end(self.process)
        how = "closed its connection" if status is None else f"ended with exit code {status}"
        self.lost = self.explain(how if (status or 0) >= 0 else f"was ended by {signal.Signals(-(status or 0)).name}")
        self.disconnect()


def log_record(name: str, level: int, text: str) -> None:
    """Log a record of another process."""
    logging.getLogger(name).log(level, "%s", text)


def tokenizer_parts(tokenizer: Any) -> dict[str, Any]:
    """What `tokenizer_of` makes this tokenizer of in another process."""
    options = {name: getattr(tokenizer, name, None) for name in (*_OF_TOKENIZER, *_OF_PARSER)}
    options = {name: value for name, value in options.items() if value is not None}
    return {"backend": tokenizer.backend_tokenizer.to_str(), **options, **tokenizer.special_tokens_map}


# In the worker process.


def tokenizer_of(parts: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    backend, of_parser = Tokenizer.from_str(parts.pop("backend")), {name: parts.pop(name, None) for name in _OF_PARSER}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **parts)
    vars(tokenizer).update(of_parser)
    return tokenizer


def connect_to_trainer(
    sock: socket.socket, policy: ChannelPolicy, start: Callable[..., None], handlers: Handlers, end: Callable[[], None]
) -> Channel:
    """The channel to the process that samples. `start` gets what `WorkerProcess.connect` was given; without it nothing
    works, so its error ends this process. What is logged here is shown there."""

    def started(*values: Any) -> None:
        try:
            start(*values)
        except Exception:
            traceback.print_exc()
            os._exit(1)

    policy.channel = channel = Channel(sock, {"start": started, **handlers, **policy.handlers}, end)
    logging.getLogger().handlers = [LogToChannel(channel)]
    log.handlers, log.propagate = [], True
    return channel
