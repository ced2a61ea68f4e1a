"""Agents with their own loop, which call the model over HTTP: a command, or a function.

The process of an attempt has its output read up to a limit, and all that it has started ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from palestra.agents.agent import Agent
from palestra.core.calls import call_user_code
from palestra.core.children import end_group, split_command
from palestra.core.errors import CallTimeout, InputError, RolloutError, text_of
from palestra.core.files import scratch_root
from palestra.core.secrets import clean_environment
from palestra.core.text import read_json
from palestra.core.types import ProgramResult

_NO_PROXY = ("127.0.0.1", "localhost")
_SUPERVISOR = str(Path(__file__).with_name("supervisor.py"))
_END_S = 10.0  # for a supervisor to end what a program has started


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """Limits of one attempt on time and output, and its isolation."""

    timeout_s: float = 300.0
    max_output_bytes: int = 4_000_000
    # (command, the attempt's folder, working directory) -> the arguments that run the command in isolation
    sandbox: Callable[[Sequence[str], Path, str | None], Sequence[str]] | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The model's URL and key for one attempt; each attempt has different ones."""

    base_url: str  # as OpenAI clients want it: …/attempt/<id>/v1
    api_key: str
    attempt_id: str = ""
    agents: Mapping[str, Endpoint] = field(default_factory=dict)  # further agents, by label

    @property
    def anthropic_url(self) -> str:
        """Anthropic's clients add /v1 by themselves."""
        return self.base_url.removesuffix("/v1")

    def variables(self) -> dict[str, str]:
        """Environment variables that the clients of both providers read."""
        direct = dict.fromkeys((*_NO_PROXY, urlsplit(self.base_url).hostname))
        proxies = ",".join(filter(None, (os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), *direct)))
        # traces of the SDK would go to OpenAI, with a key that it does not know
        variables = {"OPENAI_AGENTS_DISABLE_TRACING": "1", "NO_PROXY": proxies, "no_proxy": proxies}
        for label, endpoint in {"": self, **self.agents}.items():
            end = label and f"_{label.upper()}"
            variables |= {
                f"OPENAI_BASE_URL{end}": endpoint.base_url,
                f"OPENAI_API_BASE{end}": endpoint.base_url,
                f"OPENAI_API_KEY{end}": endpoint.api_key,
                f"ANTHROPIC_BASE_URL{end}": endpoint.anthropic_url,
                f"ANTHROPIC_API_KEY{end}": endpoint.api_key,
            }
        return variables


@dataclass
class ProgramAgent(Agent):
    """An agent whose loop is a program: it gets a case and an endpoint, and does the rest itself."""

    port: int = 0  # of the gateway; 0: any that is free
    host: str = "127.0.0.1"  # where the gateway listens
    token: str | None = field(default=None, repr=False)  # to take cases from other machines
    has_own_tools: ClassVar[bool] = True
    posts_reward: ClassVar[bool] = False  # it reports the reward itself, so no measure is needed

    async def run(self, case: Mapping[str, Any], endpoint: Endpoint, limits: ProgramLimits) -> ProgramResult:
        """One attempt at a case. What goes wrong in the program is in the result, or raises RolloutError."""
        raise NotImplementedError

    def routes(self) -> Sequence[Any]:
        """Routes that it adds to the gateway."""
        return ()


@dataclass
class CommandAgent(ProgramAgent):
    """A command, started once for each attempt. It sees no key of ours but what `env` gives it."""

    command: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    answer_files: Sequence[Path] = ()  # cases and measures: hidden from a program in the sandbox

    async def run(self, case: Mapping[str, Any], endpoint: Endpoint, limits: ProgramLimits) -> ProgramResult:
        with tempfile.TemporaryDirectory(prefix="palestra-attempt-", dir=scratch_root()) as name:
            folder = Path(name)
            (folder / "case.json").write_text(json.dumps(case, ensure_ascii=False), encoding="utf-8")
            file = folder / "result.json"
            files = {"PALESTRA_CASE_FILE": str(folder / "case.json"), "PALESTRA_RESULT_FILE": str(file)}
            env = {**clean_environment(), **self.env, **endpoint.variables(), **files}
            self.check_exists(env)
            command = limits.sandbox(self.command, folder, self.cwd) if limits.sandbox else self.command
            ended = await _run_process(command, env, folder / "case.json", self.cwd, limits)
            if file.is_symlink() or not file.is_file():  # no pipe, from which nothing would come, and no file of ours
                return ended
            try:
                with file.open("rb") as opened:
                    text = opened.read(limits.max_output_bytes).decode("utf-8", "replace")
                return replace(ended, result=read_json(text))
            except OSError:
                return ended
            except ValueError:
                return replace(ended, result=text)

    def check_exists(self, env: Mapping[str, str] | None = None) -> None:
        """RolloutError if there is no such program."""
        env = {**clean_environment(), **self.env} if env is None else env
        program = str(Path(self.cwd or "", self.command[0])) if "/" in self.command[0] else self.command[0]
        if shutil.which(program, path=env.get("PATH")) is None:
            raise RolloutError(f"the agent's command {shlex.join(self.command)} could not be started: no such program")


@dataclass
class FunctionAgent(ProgramAgent):
    """A function (case, base_url, api_key), which may be async; what it returns is the attempt's result.

    With a parameter `agents` it gets the endpoints of further agents, by label: `agents["critic"].base_url`.
    """

    function: Callable[..., Any] = lambda case, base_url, api_key: None

    async def run(self, case: Mapping[str, Any], endpoint: Endpoint, limits: ProgramLimits) -> ProgramResult:
        began = time.monotonic()
        named: dict[str, Any] = {}
        with contextlib.suppress(TypeError, ValueError):  # a callable without a signature
            if "agents" in signature(self.function).parameters:
                named["agents"] = endpoint.agents
        arguments = (dict(case), endpoint.base_url, endpoint.api_key)
        function = partial(self.function, *arguments, **named)
        try:
            result = await call_user_code("the agent", function, limit_s=limits.timeout_s)
        except RolloutError as failure:  # a function that gives up is scored, as a command is
            seconds, error = time.monotonic() - began, failure.__cause__
            if error is None or isinstance(error, CallTimeout):
                return ProgramResult(stopped="time", seconds=seconds)
            return ProgramResult(1, stderr=text_of(error), seconds=seconds)
        return ProgramResult(result=result, seconds=time.monotonic() - began)


class _Running(asyncio.SubprocessProtocol):
    """Collects stdout (1) and stderr (2), up to a limit for both together."""

    def __init__(self, max_output_bytes: int) -> None:
        self.texts = {1: bytearray(), 2: bytearray()}
        self.left = max_output_bytes
        self.ended = asyncio.Event()  # by itself, or at the limit
        self.closed = asyncio.Event()  # the supervisor has ended, and its pipes are read

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.texts[fd] += data[: max(0, self.left)]
        self.left -= len(data)
        if self.left < 0:
            self.ended.set()

    def process_exited(self) -> None:
        self.ended.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()


async def _run_process(
    command: Sequence[str], env: Mapping[str, str], stdin: Path, cwd: str | None, limits: ProgramLimits
) -> ProgramResult:
    """Run a command under a supervisor (see supervisor.py) to its end, or to the first limit that it meets.

    What it has started ends with it, also when this is cancelled.
    """
    began = time.monotonic()
    with stdin.open("rb") as case:
        running = _Running(limits.max_output_bytes)
        transport, _ = await asyncio.get_running_loop().subprocess_exec(
            lambda: running,
            *(sys.executable, "-IS", _SUPERVISOR, *command),
            env=dict(env),
            cwd=cwd,
            stdin=case,
            start_new_session=True,
        )
    stopped: Literal["time", "output"] | None = None
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(running.ended.wait(), limits.timeout_s)
        if transport.get_returncode() is None:
            stopped = "output" if running.left < 0 else "time"
    finally:
        if transport.get_returncode() is None:  # the supervisor ends what the program has started
            transport.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(running.closed.wait(), _END_S)
        except TimeoutError:
            end_group(transport.get_pid())
        transport.close()
    code = transport.get_returncode()
    if stopped or code is None:
        code = -signal.SIGKILL
    output, errors = (running.texts[fd].decode("utf-8", "replace") for fd in (1, 2))
    return ProgramResult(code, output, errors, time.monotonic() - began, stopped)


def command_agent(
    command: str | Sequence[str],
    *,
    name: str | None = None,
    model: str | None = "palestra/tiny",
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
) -> CommandAgent:
    """An agent that is a program: `train_grpo(command_agent(["python", "my_agent.py"]), suite, …)`.

    Each attempt is a process. It finds the model by OPENAI_BASE_URL and OPENAI_API_KEY (or ANTHROPIC_BASE_URL and
    ANTHROPIC_API_KEY), and the case as JSON on its standard input and in the file PALESTRA_CASE_FILE.
    """
    words = split_command(command)
    if not words:
        raise InputError("the agent's command is empty; give the program and its arguments: ['python', 'my_agent.py']")
    folder = None if cwd is None else str(cwd)
    return CommandAgent(name or _name_of(words), model, command=tuple(words), env=dict(env or {}), cwd=folder)


def function_agent(function: Callable[..., Any], model: str | None = "palestra/tiny") -> FunctionAgent:
    """An agent that is a function of this process."""
    return FunctionAgent(getattr(function, "__name__", "agent").strip("<>"), model, function=function)


def _name_of(words: Sequence[str]) -> str:
    """The file that the command runs, or its program.

    >>> _name_of(["python", "-u", "agents/shop.py", "--fast"]), _name_of(["codex", "exec"])
    ('shop', 'codex')
    """
    files = [word for word in words if Path(word).suffix in (".py", ".js", ".mjs", ".ts", ".sh")]
    return Path(files[0] if files else words[0]).stem
