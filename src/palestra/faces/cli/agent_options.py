"""What to train without an agent file: `--agent-cmd`, `--cases`, `--measure`, `--mcp` and their like."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import click

from palestra.agents.agent import Agent
from palestra.agents.programs import command_agent
from palestra.core.config import RunConfig, read_yaml_config
from palestra.core.errors import PalestraError, did_you_mean
from palestra.core.files import import_file
from palestra.evals.suite import EvalSuite
from palestra.faces.cli.agent_file import HELD_OUT_SHARE, AgentFile, open_agent_file
from palestra.faces.cli.serve import require_serve_extra
from palestra.tools.mcp_client import McpServer

Function = TypeVar("Function", bound=Callable[..., Any])
_DEFAULT_MODEL = "palestra/tiny"


@dataclass(frozen=True)
class AgentOptions:
    """The options, with absolute paths, so that a run can be resumed from anywhere."""

    agent_cmd: str | None = None
    agent_port: int | None = None
    cases: str | None = None
    held_out: str | None = None
    measure: Sequence[str] = ()
    mcp: Sequence[str] = ()
    mcp_shared: Sequence[str] = ()
    instructions: str | None = None
    cwd: str = ""

    @classmethod
    def take(cls, parameters: dict[str, Any]) -> AgentOptions:
        """Those among a command's parameters, which lose them by this."""
        values = {f.name: parameters.pop(f.name) for f in fields(cls) if f.name in parameters}
        options = cls(**values, cwd=str(Path.cwd()))
        held_out = options.held_out
        return replace(
            options,
            cases=options.cases and str(Path(options.cases).absolute()),
            held_out=held_out if held_out is None or _is_share(held_out) else str(Path(held_out).absolute()),
            measure=tuple(_absolute_measure(spec) for spec in options.measure),
        )

    @classmethod
    def from_record(cls, record: Mapping[str, Any] | None) -> AgentOptions:
        """Those of a run that is resumed."""
        try:
            return cls(**record) if record else cls()
        except TypeError:
            raise PalestraError("run.json: agent_options are not those of a run; restore it from a copy") from None

    def record(self) -> dict[str, Any]:
        """For run.json; empty where none was given."""
        return asdict(self) if self.are_set else {}

    def arguments(self) -> list[str]:
        """As command-line arguments, for a run in the background."""
        words: list[str] = []
        for f in fields(self):
            value = getattr(self, f.name)
            values = value if isinstance(value, (list, tuple)) else [value]
            if f.name != "cwd":
                words += [w for v in values if v is not None for w in (f"--{f.name.replace('_', '-')}", str(v))]
        return words

    @property
    def are_set(self) -> bool:
        return any(getattr(self, f.name) not in (None, ()) for f in fields(self) if f.name != "cwd")

    def open(
        self, agent_file: str | None, config_file: Path | None, settings: Mapping[str, Any]
    ) -> tuple[AgentFile, Agent, RunConfig]:
        """An agent file (or the demo) with these in the place of what it defines."""
        self._check()
        if self.cases is None:
            file, agent, config = open_agent_file(agent_file, config_file, settings)
        elif agent_file is None:
            file, agent, config = self._without_file(config_file, settings)
        else:
            file, agent, config = open_agent_file(agent_file, config_file, settings)
            file = replace(file, suite=self._suite(), held_out=self._held_out())
        if self.measure:
            file = replace(file, measures=[load_measure(spec) for spec in self.measure])
        return file, self._agent(agent), config

    def _check(self) -> None:
        if self.agent_cmd is not None and self.agent_port is not None:
            raise PalestraError(
                "--agent-cmd runs the agent here, --agent-port lets external agents take the cases; choose"
            )
        if self.is_program and (self.mcp or self.mcp_shared or self.instructions is not None):
            raise PalestraError(
                "--mcp and --instructions are for our own agent loop; a program has tools and instructions of its own"
            )
        if self.held_out is not None and self.cases is None:
            raise PalestraError("--held-out goes with --cases; an agent file has its own `held_out`")
        if self.cases is not None and not self.measure and self.agent_port is None:
            raise PalestraError(
                "--cases needs a measure, which tells good from bad: --measure score.py:score, where "
                "def score(ctx): return ctx.expect in ctx.final_assistant_message.text"
            )
        if self.is_program:
            require_serve_extra()

    @property
    def is_program(self) -> bool:
        return self.agent_cmd is not None or self.agent_port is not None

    def _without_file(
        self, config_file: Path | None, settings: Mapping[str, Any]
    ) -> tuple[AgentFile, Agent, RunConfig]:
        layer = {**(read_yaml_config(config_file) if config_file else {}), **settings}
        config = RunConfig.build({"model.name": _DEFAULT_MODEL}, layer)
        agent = Agent(Path(str(self.cases)).stem, config.model.name, self.instructions or "")
        file = AgentFile("", agent, self._suite(), self._held_out(), None, None, {})
        return file, agent, config

    def _suite(self) -> EvalSuite:
        return EvalSuite.from_jsonl(str(self.cases))

    def _held_out(self) -> EvalSuite | float:
        if self.held_out is None:
            return HELD_OUT_SHARE
        return float(self.held_out) if _is_share(self.held_out) else EvalSuite.from_jsonl(self.held_out)

    def _agent(self, agent: Agent) -> Agent:
        """The program, or the agent with the MCP servers."""
        if self.agent_cmd is not None:
            return command_agent(self.agent_cmd, model=agent.model, cwd=self.cwd)
        if self.agent_port is not None:
            from palestra.harness.outside import OutsideAgent

            return OutsideAgent("external-agents", agent.model, port=self.agent_port)
        servers = [*map(McpServer, self.mcp), *(McpServer(command, shared=True) for command in self.mcp_shared)]
        changed: dict[str, Any] = {"mcp_servers": [*agent.mcp_servers, *servers]}
        if self.instructions is not None:
            changed["instructions"] = self.instructions
        return replace(agent, **changed)


def agent_options(function: Function) -> Function:
    """Add the options to a command."""
    for option in (
        click.option("--instructions", metavar="TEXT", help="The system message of our own agent loop, with --cases."),
        click.option("--mcp-shared", multiple=True, metavar="COMMAND", help="One such server for all attempts."),
        click.option("--mcp", multiple=True, metavar="COMMAND", help="An MCP server whose tools the agent gets."),
        click.option("--measure", multiple=True, metavar="FILE:NAME", help="Tells good from bad; may be repeated."),
        click.option("--held-out", metavar="FILE_OR_SHARE", help="With --cases: cases to score on. [default: 0.2]"),
        click.option("--cases", metavar="FILE", help="Cases as JSON lines: input, expect, and what else you need."),
        click.option(
            "--agent-port", type=click.IntRange(0, 65535), help="Let external agents take cases, at this port."
        ),
        click.option("--agent-cmd", metavar="COMMAND", help="A program that calls the model by its base URL."),
    ):
        function = option(function)
    return function


def load_measure(spec: str) -> Any:
    """The function of `score.py:score`."""
    path, _, name = spec.rpartition(":")
    file = Path(path)
    if path.endswith(".py") and name and not file.exists():
        raise PalestraError(f"--measure {spec}: there is no file {path}")
    if not path or not name or not file.is_file():
        raise PalestraError(
            f"--measure {spec}: expected FILE:NAME, a Python file and a function in it, as score.py:score"
        )
    module = import_file(file, path, "It should define the measure")
    if not hasattr(module, name):
        raise PalestraError(f"--measure {spec}: {path} defines no {name!r}.{did_you_mean(name, vars(module))}")
    return getattr(module, name)


def _absolute_measure(spec: str) -> str:
    path, colon, name = spec.rpartition(":")
    return f"{Path(path).absolute()}{colon}{name}" if colon else spec


def _is_share(text: str) -> bool:
    try:
        return 0.0 <= float(text) < 1.0
    except ValueError:
        return False
