"""`palestra sft`: learn from conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from palestra import run as executor
from palestra.cli import settings
from palestra.cli.common import PATH, config_option, debug_option, json_line_option
from palestra.cli.display import watching
from palestra.cli.find_run import find_run, with_model_of_run
from palestra.cli.settings import layer
from palestra.cli.summary import print_outcome
from palestra.runs.request import RunRequest


@settings.command_of_run("sft")
@click.argument("traces")
@click.option("--agent", "agent_file", metavar="FILE", help="Score this agent file's held-out cases before and after.")
@click.option("--folder", type=PATH, help="Use this as the run folder, instead of a new one.")
@config_option
@json_line_option
@debug_option
def command(
    traces: str, agent_file: str | None, folder: Path | None, config_file: Path | None, as_json: bool, **parameters: Any
) -> None:
    """Train a model on conversations: cross-entropy on what the assistant says in them.

    TRACES is a file of JSON lines (OpenAI, Anthropic, ShareGPT or ATIF; what `palestra record` writes), or a run, whose
    passed rollouts are learned.

    \b
    Examples:
      palestra sft traces.jsonl --model.name Qwen/Qwen3-0.6B
      palestra sft traces.jsonl --model.name Qwen/Qwen3-0.6B --agent my_agent.py --stages.sft_epochs 2
      palestra sft k3f9 --model.name palestra/tiny --agent my_agent.py
      palestra train my_agent.py --stages sft:traces.jsonl,grpo        continue with reinforcement learning

    Continue a run that was stopped with `palestra train --resume RUN`.
    """
    console = Console(stderr=as_json)
    options = with_model_of_run(settings.from_options(parameters))
    found = None if Path(traces).exists() else find_run(traces)
    options |= {"stages.plan": "sft", "stages.traces": str(found.folder.path if found else Path(traces).absolute())}
    request = RunRequest(agent_file=agent_file, settings=layer(config_file, options), name=Path(traces).stem)
    run, outcome = executor.train(request, watching(console, "palestra train"), folder)
    print_outcome(console, run, outcome, as_json)
