"""An OpenEnv server as an environment: one WebSocket session for each attempt, and its actions as tools."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from palestra.agents.tools.tool import Tool
from palestra.core.errors import ServiceError
from palestra.core.http import HttpError, Request
from palestra.core.types import Problem
from palestra.envs.base import Split
from palestra.envs.env import Env, EnvConfig, seeded_problems

_OVER = "The episode is over."
_TIMEOUT_S = 60.0
_MAX_BYTES = 16 * 2**20
_RELEASE_S = 2.0


class OpenEnv(Env):
    """The problems are seeds that the server is reset with; the reward is the sum of what its steps gave.

    A server takes one session at a time unless it was made with `create_app(…, max_concurrent_envs=N)`; give the same
    number as `max_sessions`, at least the group size, and no more attempts than that run at a time. One that takes a
    single session is noticed.
    """

    name = "openenv"
    instructions = "You act in an environment by calling the tool. Go on until the episode is over."
    scores_are_bounded = False

    def __init__(
        self, base_url: str, config: EnvConfig | None = None, question: str = "Begin.", max_sessions: int | None = None
    ) -> None:
        super().__init__(config)
        self._url = base_url.rstrip("/")
        self._question = question
        self.max_episodes = max_sessions
        self._socket: Any = None
        self.total = 0.0
        self.done = False

    def setup(self) -> None:
        """Ask the server for the form of its actions."""
        request = Request(f"{_with_scheme(self._url, 'http')}/schema", timeout_s=_TIMEOUT_S, max_bytes=_MAX_BYTES)
        try:
            schema = request.parse(request.send())["action"]
        except (HttpError, KeyError, TypeError) as error:
            raise ServiceError(f"{self._url} is no OpenEnv server that can be asked for its schema: {error}") from None
        properties = {k: v for k, v in schema.get("properties", {}).items() if k != "metadata"}
        self._parameters = {**schema, "properties": properties}
        self._about = schema.get("description", "Act in the environment.").strip().splitlines()[0]
        self.max_episodes = self.max_episodes or self._session_limit()

    def _session_limit(self) -> int | None:
        """The sessions of a server that has no second one; None where it has."""
        with self._connect() as first, self._connect() as second:
            for socket in (first, second):
                try:
                    _ask(socket, "state", {})
                except NoSession as full:
                    return full.sessions
                except RuntimeError:  # it has taken the session, and has no state before a reset
                    continue
        return None

    def problems(self, split: Split) -> Sequence[Problem]:
        return seeded_problems(self.config, split, self._question)

    def start(self) -> str:
        self.total, self.done = 0.0, False
        until = time.monotonic() + (_RELEASE_S if self.max_episodes else 0.0)
        while True:
            self._socket = self._connect()
            try:
                return self._observe(_ask(self._socket, "reset", dict(self.problem.row)))
            except NoSession:  # the server may still be ending the attempt before
                self._socket.close()
                if time.monotonic() >= until:
                    raise
                time.sleep(0.1)

    def _connect(self) -> Any:
        from websockets.sync.client import connect

        return connect(f"{_with_scheme(self._url, 'ws')}/ws", open_timeout=_TIMEOUT_S, max_size=_MAX_BYTES)

    def tools(self) -> Sequence[Tool]:
        """One tool that takes the server's action; of a server of MCP tools, its tools."""
        if "tool_name" not in self._parameters["properties"]:
            return [Tool("act", self._about, self._parameters, self._act)]
        listed = _ask(self._socket, "step", {"type": "list_tools"}).get("observation", {})
        tools = [(tool["name"], tool.get("description"), tool["input_schema"]) for tool in listed.get("tools", ())]
        return [Tool(name, text or name, schema, partial(self._call, name)) for name, text, schema in tools]

    def _act(self, **action: Any) -> str:
        return _OVER if self.done else self._observe(_ask(self._socket, "step", action))

    def _call(self, tool_name: str, /, **arguments: Any) -> str:
        return self._act(type="call_tool", tool_name=tool_name, arguments=arguments)

    def _observe(self, result: Mapping[str, Any]) -> str:
        self.total += float(result.get("reward") or 0.0)
        self.done = bool(result.get("done"))
        observation = result.get("observation", result)
        text = observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False)
        return f"{text}\n{_OVER}" if self.done else text

    def score(self, answer: str) -> float:
        return self.total

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


class NoSession(RuntimeError):
    """The server has no free session; `sessions` says how many it has."""

    def __init__(self, message: str, sessions: int) -> None:
        super().__init__(f"{message}; set max_sessions, and start the server with create_app(…, max_concurrent_envs=N)")
        self.sessions = sessions


def _ask(socket: Any, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The data of the server's answer; an error is raised with the server's message."""
    from websockets.exceptions import ConnectionClosed

    closed: ConnectionClosed | None = None
    try:
        socket.send(json.dumps({"type": kind, "data": data}))
    except ConnectionClosed as error:  # what the server said before it closed can still be read
        closed = error
    try:
        answer = json.loads(socket.recv(timeout=_TIMEOUT_S))
    except ConnectionClosed as error:
        raise RuntimeError(f"the server closed the session: {closed or error}") from None
    data_of_answer: Mapping[str, Any] = answer.get("data") or {}
    if answer.get("type") == "error":
        message = str(data_of_answer.get("message", "the server gave an error"))
        if data_of_answer.get("code") == "CAPACITY_REACHED":
            raise NoSession(message, int(data_of_answer.get("max_sessions", 1)))
        raise RuntimeError(message)
    return data_of_answer


def _with_scheme(url: str, kind: str) -> str:
    """The URL for HTTP or for WebSockets, whichever it was given as.

    >>> _with_scheme("https://host/env", "ws")
    'wss://host/env'
    """
    scheme, _, rest = url.partition("://")
    return f"{kind}{'s' if scheme in ('https', 'wss') else ''}://{rest or scheme}"
