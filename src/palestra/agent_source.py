"""What to train: a Python file with an `agent` and a `suite`, or options such as `--agent-cmd` and `--cases`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.util import cache_from_source
from pathlib import Path
from types import ModuleType
from typing import Any

from palestra.agents.agent import Agent
from palestra.agents.openai_agents import as_agent
from palestra.agents.programs import command_agent
from palestra.agents.tools.mcp_client import McpServer
from palestra.core.config import RunConfig
from palestra.core.errors import (
    InputError,
    NotFoundError,
    PalestraError,
    SettingError,
    UnreadableFileError,
    did_you_mean,
    needs_extra,
)
from palestra.core.files import absolute_spec, import_file, import_function
from palestra.core.grpo_config import GRPOTrainingConfig
from palestra.evals.suite import EvalSuite, hold_out

DEMO = "palestra.demo"
HELD_OUT_SHARE = 0.2
_DEFAULT_MODEL = "palestra/tiny"
_EXPECTED = "An agent file defines `agent = Agent(…)` and `suite = EvalSuite.from_records(…)`"


@dataclass(frozen=True)
class AgentFile:
    """What an agent file defines; `source` is its path, by which `--resume` finds it again."""

    source: str
    agent: Agent
    suite: EvalSuite
    held_out: EvalSuite | float | None
    measures: Sequence[Any] | None
    reward_weights: Sequence[float] | Mapping[str, float] | None
    config: Mapping[str, Any]


def load_agent_file(path: str | None) -> AgentFile:
    """Import an agent file (None: the demo) and check what it defines."""
    source = DEMO if path in (None, DEMO) else str(Path(str(path)).resolve())
    module = importlib.import_module(DEMO) if source == DEMO else _import_file(Path(source), str(path))
    suite = _required(module, "suite", source)
    if not isinstance(suite, EvalSuite):
        raise InputError(f"{source}: `suite` is a {type(suite).__name__}; expected EvalSuite.from_records(…)")
    held_out = getattr(module, "held_out", HELD_OUT_SHARE)
    try:
        trained, _ = hold_out(suite, held_out)
    except PalestraError as error:
        raise InputError(f"{source}: {error}") from None
    config = getattr(module, "config", {})
    if isinstance(config, GRPOTrainingConfig):
        config = config.to_run_config(len(trained)).model_dump()
    if not isinstance(config, Mapping):
        raise InputError(
            f"{source}: `config` is a {type(config).__name__}; expected a dict such as {{'train.max_steps': 50}} "
            "or a GRPOTrainingConfig"
        )
    return AgentFile(
        source=source,
        agent=as_agent(_required(module, "agent", source)),
        suite=suite,
        held_out=held_out,
        measures=getattr(module, "measures", None),
        reward_weights=getattr(module, "reward_weights", None),
        config=config,
    )


def open_agent_file(path: str | None, settings: Mapping[str, Any]) -> tuple[AgentFile, Agent, RunConfig]:
    """An agent file with its agent and config: `settings` over its own. A model in `settings` replaces the agent's."""
    file = load_agent_file(path)
    model = settings.get("model.name", file.agent.model)
    own = {} if model is None else {"model.name": model}
    return file, replace(file.agent, model=model), RunConfig.build(file.config, settings, own)


def _import_file(path: Path, shown: str) -> ModuleType:
    if path.is_dir():
        raise InputError(f"{shown} is a folder; give a Python file. {_EXPECTED}")
    if not path.is_file():
        near = did_you_mean(path.name, [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else [])
        raise NotFoundError(f"there is no agent file {shown}.{near} Without one, `palestra train` trains the demo")
    try:
        return import_file(path, shown, _EXPECTED)
    except PalestraError as error:
        if "palestra" in path.read_text(encoding="utf-8", errors="replace"):
            raise
        program = f"a program with a loop of its own trains by --agent-cmd 'python {shown}'"
        raise InputError(f"{error}\n{_EXPECTED}; {program}") from error


def _required(module: ModuleType, name: str, source: str) -> Any:
    if not hasattr(module, name):
        raise InputError(f"{source} defines no `{name}`. {_EXPECTED}, and may define held_out, measures and config")
    return getattr(module, name)


@dataclass(frozen=True)
class AgentOptions:
    """The options, with absolute paths, so that a run can be resumed from anywhere."""

    agent_cmd: str | None = None
    agent_port: int | None = None
    agent_host: str | None = None
    cases: str | None = None
    held_out: str | None = None
    measure: Sequence[str] = ()
    mcp: Sequence[str] = ()
    mcp_shared: Sequence[str] = ()
    instructions: str | None = None
    cwd: str = ""

    @classmethod
    def take(cls, parameters: dict[str, Any]) -> AgentOptions:
        """Remove the options from a command's parameters."""
        _refuse_removed(parameters)
        values = {f.name: parameters.pop(f.name) for f in fields(cls) if f.name in parameters}
        options = cls(**values, cwd=str(Path.cwd()))
        held_out = options.held_out
        return replace(
            options,
            cases=options.cases and str(Path(options.cases).absolute()),
            held_out=held_out if held_out is None or _is_share(held_out) else str(Path(held_out).absolute()),
            measure=tuple(absolute_spec(spec) for spec in options.measure),
        )

    @classmethod
    def from_record(cls, record: Mapping[str, Any] | None) -> AgentOptions:
        """The options of a run that is resumed."""
        try:
            options = {"cwd": str(Path.cwd()), **record} if record else {}
            _refuse_removed(options)
            return cls(**options)
        except TypeError:
            raise UnreadableFileError(
                "run.json: agent_options are not those of a run; restore it from a copy"
            ) from None

    def record(self) -> dict[str, Any]:
        """For run.json; empty where none was given."""
        return asdict(self) if self.are_set else {}

    def arguments(self) -> list[str]:
        """As command-line arguments, for commands that are shown to the user."""
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

    def open(self, agent_file: str | None, settings: Mapping[str, Any]) -> tuple[AgentFile, Agent, RunConfig]:
        """An agent file (or the demo) with these in the place of what it defines."""
        self._check()
        if self.cases is not None and agent_file is None:
            config = RunConfig.build({"model.name": _DEFAULT_MODEL}, settings)
            agent = Agent(Path(self.cases).stem, config.model.name, self.instructions or "")
            file = AgentFile("", agent, EvalSuite.from_jsonl(self.cases), self._held_out(), None, None, {})
        else:
            file, agent, config = open_agent_file(agent_file, settings)
            if self.cases is not None:
                file = replace(file, suite=EvalSuite.from_jsonl(self.cases), held_out=self._held_out())
        if self.measure:
            file = replace(file, measures=[import_function(spec, "--measure") for spec in self.measure])
        return file, self._agent(agent), config

    def _check(self) -> None:
        if self.agent_cmd is not None and self.agent_port is not None:
            raise SettingError("--agent-cmd starts agents, --agent-port waits for others; choose one")
        if self.agent_host is not None and not self.is_program:
            raise SettingError("--agent-host goes with --agent-port or --agent-cmd")
        if self.is_program and (self.mcp or self.mcp_shared or self.instructions is not None):
            raise SettingError(
                "--mcp and --instructions are for our own agent loop; a program has tools and instructions of its own"
            )
        if self.held_out is not None and self.cases is None:
            raise SettingError("--held-out goes with --cases; an agent file has its own `held_out`")
        if self.cases is not None and not self.measure and self.agent_port is None:
            raise SettingError(
                "--cases needs a measure, which tells good from bad: --measure score.py:score, where "
                "def score(ctx): return ctx.expect in ctx.final_assistant_message.text"
            )
        if self.is_program:
            with needs_extra("this", "serve"):
                import starlette  # noqa: F401
                import uvicorn  # noqa: F401
        if self.agent_host is not None:
            from palestra.servers.web import check_token

            check_token(self.agent_host, self._token)

    @property
    def _token(self) -> str | None:
        """Not an option: options are written to the run's folder."""
        return None if self.agent_host is None else os.environ.get("PALESTRA_TOKEN")

    @property
    def is_program(self) -> bool:
        return self.agent_cmd is not None or self.agent_port is not None

    def _held_out(self) -> EvalSuite | float:
        if self.held_out is None:
            return HELD_OUT_SHARE
        return float(self.held_out) if _is_share(self.held_out) else EvalSuite.from_jsonl(self.held_out)

    def _agent(self, agent: Agent) -> Agent:
        """The program, or the agent with the MCP servers."""
        address: dict[str, Any] = {"host": self.agent_host or "127.0.0.1", "token": self._token}
        if self.agent_cmd is not None:
            program = command_agent(self.agent_cmd, model=agent.model, cwd=self.cwd)
            program.check_exists()
            scripts = [spec.rpartition(":")[0] for spec in self.measure]
            files = filter(None, (self.cases, self.held_out, *scripts, *map(cache_from_source, scripts)))
            return replace(program, answer_files=[*map(Path, files)], **address)
        if self.agent_port is not None:
            from palestra.sources.programs.outside import OutsideAgent

            return OutsideAgent("external-agents", agent.model, port=self.agent_port, **address)
        servers = [*map(McpServer, self.mcp), *(McpServer(command, shared=True) for command in self.mcp_shared)]
        changed: dict[str, Any] = {"mcp_servers": [*agent.mcp_servers, *servers]}
        if self.instructions is not None:
            changed["instructions"] = self.instructions
        return replace(agent, **changed)


_REMOVED = {  # options, which stored runs have as None
    "agent_image": "start the container by --agent-cmd 'docker run --rm --init -i …'",
    "improved": "put the texts into the agent file",
}


def _refuse_removed(options: dict[str, Any]) -> None:
    """Take removed options out; SettingError for one that has a value."""
    for name, instead in _REMOVED.items():
        if options.pop(name, None) is not None:
            raise SettingError(f"--{name.replace('_', '-')} was removed: {instead}")


def _is_share(text: str) -> bool:
    """Whether --held-out is a share; a file may have a number as its name."""
    try:
        share = float(text)
    except ValueError:
        return False
    if not 0.0 <= share < 1.0 and not Path(text).exists():
        raise SettingError(f"--held-out {text} is no share of the cases; use a number from 0 to below 1, or a file")
    return 0.0 <= share < 1.0
