"""Who is talked with: a model, and the tools and instructions of its agent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from palestra.core.errors import PalestraError
from palestra.faces.cli.agent_file import DEMO, load_agent_file
from palestra.faces.cli.find_run import RUNS, model_of
from palestra.runs.store import RunFolder


@dataclass(frozen=True)
class Partner:
    """A model by name, what it was told to be, and its tools; `note` says what is missing."""

    model: str
    instructions: str = ""
    tools: Sequence[Any] = ()
    note: str = ""


def find_partner(run_or_model: str, agent_file: str | None, instructions: str | None) -> Partner:
    """The run's own agent, unless another is named; a plain model has none."""
    model, _ = model_of(run_or_model)
    if agent_file is not None:
        agent = load_agent_file(DEMO if agent_file == "demo" else agent_file).agent
        partner = Partner(model, agent.fixed_instructions, agent.tools)
    else:
        run = _run_of(run_or_model)
        partner = Partner(model) if run is None else _of_run(model, run)
    return partner if instructions is None else replace(partner, instructions=instructions)


def _run_of(name: str) -> RunFolder | None:
    """The run that a name means, also by its model folder."""
    given = Path(name).expanduser()
    for path in (given, RUNS / name, given.parent if given.name == "model" else given):
        if (path / "run.json").is_file():
            return RunFolder.open(path)
    return None


def _of_run(model: str, run: RunFolder) -> Partner:
    record = run.record
    if environment := record.get("environment"):
        return _of_environment(model, environment)
    told = str(record.get("instructions") or "")
    source = record.get("source")
    if not record.get("tools"):
        return Partner(model, told)
    if source is None:
        return Partner(model, told, note="The run was started from Python, so its tools are not known; --agent FILE")
    try:
        agent = load_agent_file(str(source)).agent
    except PalestraError as error:
        return Partner(model, told, note=f"Without its tools: {error} (--agent FILE names another)")
    return Partner(model, told, agent.tools)


def _of_environment(model: str, environment: dict[str, Any]) -> Partner:
    """The tools of an environment belong to one attempt at one problem: here, the first held-out one."""
    from palestra.envs.load import load_env

    env = load_env(environment["name"], environment["settings"])
    episode = env.open(env.problems("held_out")[0])
    told = "\n\n".join(message.text for message in episode.prompt if message.role == "system")
    # solved examples may stand before it
    asked = next((message.text for message in reversed(episode.prompt) if message.role == "user"), "")
    return Partner(model, told, tuple(episode.tools), f"The tools are those of the problem: {asked}")
