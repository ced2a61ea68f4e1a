"""The table of extras: folders of `palestra/extras/` that can be deleted, and what other code asks them for.

Nothing outside of `extras/` imports it, and no extra imports another one: they ask this table by name. Where the folder
is missing, the error names the extra and the line that installs it.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from palestra.core.errors import MissingPackageError

EXTRAS = {
    "adapters": "environments of verifiers, OpenEnv and gymnasium",
    "agent_tools": "the ten rl_* tools with which an LLM agent runs trainings",
    "atropos": "environments in other programs, over the trajectory API; Atropos environments",
    "dashboard": "runs in a browser",
    "distill": "distillation: learning from a teacher's probabilities along the model's own rollouts",
    "environments": "the library: calculator, sql, shell, reasoning-gym, …",
    "gguf": "GGUF files in and out, Ollama, palestra/smollm2",
    "hub": "models on the Hugging Face hub",
    "plan": "time, memory and cost of a training, predicted",
    "ranks": "one training on several GPUs or machines (FSDP2)",
    "ray": "rollout actors on a Ray cluster",
    "record": "recording what an agent says, or the tokens of its attempts; traces of other programs as conversations",
    "rescore": "stored rollouts scored with changed measures",
    "step_trainer": "StepTrainer: GRPO step by step from Python",
    "tinker": "the Tinker API, as a server and as a backend",
    "trl": "TRL's names and arguments",
    "vllm": "vLLM as the sampler",
}
PIP = {"adapters": "gymnasium,openenv,verifiers", "agent_tools": "mcp", "dashboard": "serve", "atropos": "serve"}

_RUNS, _OUTSIDE, _AGENTS = "Runs", "Agents and environments in other programs", "Trainings run by an LLM agent"
# name -> (group in `palestra --help`, module:attribute below palestra.extras, its line there)
COMMANDS = {
    "rescore": ("Train and score", "rescore.command:command", "Score a run's stored rollouts with changed measures."),
    "dashboard": (_RUNS, "dashboard.command:command", "Show runs, rollouts and tokens in a browser."),
    "plan": (_RUNS, "plan.command:command", "Predict step time, memory and cost of a training."),
    "gateway": (_OUTSIDE, "record.command:gateway", "Serve a model to agents and record each attempt's exact tokens."),
    "record": (_OUTSIDE, "record.command:record", "Record what an agent says to an OpenAI- or Anthropic-style API."),
    "trajectory": (_OUTSIDE, "atropos.commands:trajectory", "Serve the API between environments and a trainer."),
    "tinker": (_OUTSIDE, "tinker.command:tinker", "Serve models to the Tinker SDK: train and sample over its API."),
    "env process": ("", "atropos.commands:process", ""),
    "env serve": ("", "atropos.commands:serve", ""),
    "env run-atropos": ("", "atropos.commands:run_atropos", ""),
    "mcp": (_AGENTS, "agent_tools.commands:mcp", "Offer the rl_* tools over the Model Context Protocol."),
    "tools": (_AGENTS, "agent_tools.commands:tools", "Print the schemas of the rl_* tools."),
}

# sections of the config that an extra declares: name -> its class
SETTINGS = {
    "distill": "distill.settings:DistillSection",
    "vllm": "vllm.settings:VllmSection",
    "tinker": "tinker.settings:TinkerSection",
    "ray": "ray.settings:RaySection",
}

BACKENDS = ("ray", "tinker")  # besides `local`

# what else other code asks for -> module:attribute below palestra.extras
PROVIDES = {
    "backend: ray": "ray.backend",
    "backend: tinker": "tinker.client.backend",
    "several ranks": "ranks.processes",
    "--nproc": "ranks.launch:launch_ranks",
    "learners of several ranks": "ranks.learner:FsdpLearner",
    "rollouts of several ranks": "ranks.rollouts:RolloutRanks",
    "models in shards": "ranks.sharding",
    "vllm.mode": "vllm.open:open_policy",
    "distill.coefficient": "distill.teacher:teacher_of",
    "palestra/smollm2": "gguf.read:smollm2_file",
    "GGUF files": "gguf.read:cached_conversion",
    "a conversion to GGUF": "gguf.source:open_source",
    "--to gguf": "gguf.export:to_gguf",
    "to_ollama": "gguf.export:to_ollama",
    "an upload to the hub": "hub.upload:to_hub",
    "--to hub": "hub.upload:check_repo",
    "--to html": "dashboard.transcripts:page_of_run",
    "traces of other programs": "record.trace_formats:to_chat",
    "environments of other libraries": "adapters.by_name:BY_NAME",
    "reasoning-gym": "environments.reasoning_gym:task_names",
    "runs over the wire": "atropos.runs",
    "settings that fit": "plan.fitting:remedy",
    "StepTrainer": "step_trainer.trainer:StepTrainer",
    "arguments of TRL": "trl.config:read_arguments",
    "the dashboard": "dashboard.app:app_of_runs",
    "venvs of Atropos environments": "atropos.atropos",
    "settings of runs over the wire": "atropos:WIRE_DEFAULTS",
    "config --locked": "agent_tools.commands:locked_settings",
    "the form of the dashboard": "agent_tools.launcher:FormLauncher",
}


def is_installed(extra: str) -> bool:
    """Whether the folder of this extra is there."""
    return folder(extra).joinpath("__init__.py").is_file()


def has_settings(section: str) -> bool:
    """Whether the extra that declares this section of the config is there."""
    return is_installed(SETTINGS[section].partition(".")[0])


def folder(extra: str) -> Path:
    return Path(__file__).parents[1] / "extras" / extra


def missing(extra: str, what: str) -> str:
    """The message for `what`, which needs an extra whose folder was deleted."""
    return (
        f"{what} needs the extra {extra!r} ({EXTRAS[extra]}), whose folder palestra/extras/{extra} is missing here; "
        f"run: pip install --force-reinstall 'palestra[{PIP.get(extra, extra)}]'"
    )


def load(place: str, what: str) -> Any:
    """Import `module:attribute` below palestra.extras; MissingPackageError names the extra that has `what`."""
    module, _, attribute = place.partition(":")
    extra = module.partition(".")[0]
    if not is_installed(extra):
        raise MissingPackageError(missing(extra, what))
    loaded = import_module(f"palestra.extras.{module}")
    return getattr(loaded, attribute) if attribute else loaded


def command(name: str) -> Any:
    return load(COMMANDS[name][1], f"palestra {name}")


def provided(what: str) -> Any:
    """Import what the table names by `what`."""
    return load(PROVIDES[what], what)
