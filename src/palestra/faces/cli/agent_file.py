"""A user's agent file: a Python file with an `agent` and a `suite`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from palestra.agents.agent import Agent
from palestra.agents.openai_agents import as_agent
from palestra.core.config import RunConfig, read_yaml_config
from palestra.core.errors import PalestraError, did_you_mean
from palestra.core.files import import_file
from palestra.core.grpo_config import GRPOTrainingConfig
from palestra.evals.suite import EvalSuite, hold_out

DEMO = "palestra.demo"
HELD_OUT_SHARE = 0.2
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
        raise PalestraError(f"{source}: `suite` is a {type(suite).__name__}; expected EvalSuite.from_records(…)")
    held_out = getattr(module, "held_out", HELD_OUT_SHARE)
    try:
        trained, _ = hold_out(suite, held_out)
    except PalestraError as error:
        raise PalestraError(f"{source}: {error}") from None
    return AgentFile(
        source=source,
        agent=as_agent(_required(module, "agent", source)),
        suite=suite,
        held_out=held_out,
        measures=getattr(module, "measures", None),
        reward_weights=getattr(module, "reward_weights", None),
        config=_config(getattr(module, "config", {}), len(trained), source),
    )


def open_agent_file(
    path: str | None, config_file: Path | None, options: Mapping[str, Any]
) -> tuple[AgentFile, Agent, RunConfig]:
    """An agent file with its agent and whole config: its own, the YAML file's, then the command line's settings.

    A model that is named in the YAML file or on the command line replaces the agent's own.
    """
    layer = {**(read_yaml_config(config_file) if config_file else {}), **options}
    file = load_agent_file(path)
    model = layer.get("model.name", file.agent.model)
    own = {} if model is None else {"model.name": model}
    return file, replace(file.agent, model=model), RunConfig.build(file.config, layer, own)


def _import_file(path: Path, shown: str) -> ModuleType:
    if path.is_dir():
        raise PalestraError(f"{shown} is a folder; give a Python file. {_EXPECTED}")
    if not path.is_file():
        near = did_you_mean(path.name, [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else [])
        raise PalestraError(f"there is no agent file {shown}.{near} Without one, `palestra train` trains the demo")
    try:
        return import_file(path, shown, _EXPECTED)
    except PalestraError as error:
        if "palestra" in path.read_text(encoding="utf-8", errors="replace"):
            raise
        program = f"a program with a loop of its own trains by --agent-cmd 'python {shown}'"
        raise PalestraError(f"{error}\n{_EXPECTED}; {program}") from error


def _required(module: ModuleType, name: str, source: str) -> Any:
    if not hasattr(module, name):
        raise PalestraError(f"{source} defines no `{name}`. {_EXPECTED}, and may define held_out, measures and config")
    return getattr(module, name)


def _config(value: Any, cases: int, source: str) -> Mapping[str, Any]:
    if isinstance(value, GRPOTrainingConfig):
        return value.to_run_config(cases).model_dump()
    if isinstance(value, Mapping):
        return value
    raise PalestraError(
        f"{source}: `config` is a {type(value).__name__}; expected a dict such as {{'train.max_steps': 50}} "
        "or a GRPOTrainingConfig"
    )
