"""The model of a chat, with the tools and instructions of its agent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from palestra.core.errors import PalestraError
from palestra.core.run_folder import RunFolder
from palestra.faces.cli.agent_file import DEMO, load_agent_file
from palestra.faces.cli.find_run import find_run, model_of


@dataclass(frozen=True)
class Partner:
    """A model by name, with its instructions and tools; `note` says what is missing."""

    model: str
    instructions: str = ""
    tools: Sequence[Any] = ()
    note: str = ""


def find_partner(run_or_model: str, agent_file: str | None, instructions: str | None) -> Partner:
    """The run's own agent, or the one in `agent_file`; a model without a run has none."""
    model, _ = model_of(run_or_model)
    if agent_file is not None:
        agent = load_agent_file(DEMO if agent_file == "demo" else agent_file).agent
        partner = Partner(model, agent.fixed_instructions, agent.tools)
    else:
        run = find_run(run_or_model)
        partner = Partner(model) if run is None else _of_run(model, run.folder)
    return partner if instructions is None else replace(partner, instructions=instructions)


def _of_run(model: str, run: RunFolder) -> Partner:
    record = run.record
    if environment := record.get("environment"):
        return _of_environment(model, environment)
    instructions = str(record.get("instructions") or "")
    source = record.get("source")
    if not record.get("tools"):
        return Partner(model, instructions)
    if source is None:
        note = "The run was started from Python, so its tools are not known; name them with --agent FILE"
        return Partner(model, instructions, note=note)
    try:
        agent = load_agent_file(str(source)).agent
    except PalestraError as error:
        return Partner(model, instructions, note=f"Without its tools: {error} (--agent FILE names another)")
    return Partner(model, instructions, agent.tools)


def _of_environment(model: str, environment: dict[str, Any]) -> Partner:
    """The tools of an environment belong to one problem: here, the first held-out one."""
    from palestra.envs.load import load_env

    env = load_env(environment["name"], environment["settings"])
    episode = env.open(env.problems("held_out")[0])
    instructions = "\n\n".join(message.text for message in episode.prompt if message.role == "system")
    # the last user message: solved examples may precede it
    question = next((message.text for message in reversed(episode.prompt) if message.role == "user"), "")
    return Partner(model, instructions, tuple(episode.tools), f"The tools are those of the problem: {question}")
