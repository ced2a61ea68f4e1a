"""The processes of a run: their commands, their order, and when each is ready."""

from __future__ import annotations

import http.client
import json
import os
import sys
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from palestra.core.files import write_text
from palestra.runs.processes import MARK
from palestra.runs.request import SETTINGS, RunRequest

PALESTRA = [sys.executable, "-P", "-m", "palestra"]
WIRE = "wire"
STOP_ORDER = ("env", "trainer", "api")
_TRAINERS_ALONE = ("WANDB_API_KEY", "TINKER_API_KEY")
_ASK_S = 2.0
_READY_S = 3600.0  # a model may have to be downloaded first; who dies meanwhile is noticed at once


@dataclass(frozen=True)
class Step:
    """A process to start: `command` is asked for once those before it are ready, `is_ready` until it says so."""

    part: str
    command: Callable[[], list[str]]
    is_ready: Callable[[], bool]
    ready_within_s: float


def plan(request: RunRequest, folder: Path, claim_port: Callable[[str], int]) -> list[Step]:
    """In-process runs are one command; on the wire: trajectory API, trainer with its server, environment."""
    return _on_the_wire(request, folder, claim_port) if has_wire(folder) else [_in_process(request, folder)]


def has_wire(folder: Path) -> bool:
    """Whether the run of this folder has processes that talk over the wire; its journal lies there."""
    return (folder / WIRE).is_dir()


def is_on_the_wire(request: RunRequest) -> bool:
    """As asked for; unless asked, environments of other dialects are. Reads source files, runs none."""
    if request.environment is None:
        return False
    dialect = _dialect(request.environment)
    return dialect != "palestra" if request.wire is None else request.wire or dialect != "palestra"


def _dialect(environment: str) -> str:
    from palestra.envs.load import find_env

    return find_env(environment).dialect


def environment_of(part: str, run_id: str) -> dict[str, str]:
    """What a process of the run finds in its environment. The servers of a run are on loopback and ask for no token."""
    kept = {name: value for name, value in os.environ.items() if name != "PALESTRA_TOKEN"}
    if part == "env":
        kept = {name: value for name, value in kept.items() if name not in _TRAINERS_ALONE}
    return kept | {MARK: run_id, "PYTHONUNBUFFERED": "1", "COLUMNS": "120"}


def _in_process(request: RunRequest, folder: Path) -> Step:
    what = ["--env", request.environment] if request.environment else [request.agent_file] if request.agent_file else []

    def command() -> list[str]:
        if _is_run(folder):
            return [*PALESTRA, "train", "--resume", str(folder)]
        words = [word for word in what if word is not None]
        return [*PALESTRA, "train", *words, "--config", str(folder / SETTINGS), "--folder", str(folder)]

    return Step("trainer", command, lambda: _is_run(folder), _READY_S)


def _on_the_wire(request: RunRequest, folder: Path, claim_port: Callable[[str], int]) -> list[Step]:
    assert request.environment is not None
    name, ports = request.environment, {part: claim_port(part) for part in ("api", "trainer")}
    urls = {part: f"http://127.0.0.1:{port}" for part, port in ports.items()}

    def trainer() -> list[str]:
        words = [*PALESTRA, "train", "--env-url", urls["api"], "--serve-port", str(ports["trainer"])]
        if _is_run(folder):
            return [*words, "--resume", str(folder)]
        return [*words, "--env", name, "--config", str(folder / SETTINGS), "--folder", str(folder)]

    def env() -> list[str]:
        where = ["--api-url", urls["api"], "--openai.base_url", f"{urls['trainer']}/v1"]
        return [*PALESTRA, "env", "serve", name, *where, "--config", str(_env_settings(request, folder))]

    def is_served() -> bool:
        return answers(f"{urls['trainer']}/health")

    api = [*PALESTRA, "trajectory", "--port", str(ports["api"]), "--folder", str(folder / WIRE)]
    # ours wait for the model that they sample from, so both load their libraries at once; others may not
    waits = _dialect(name) == "palestra"
    return [
        Step("api", lambda: api, lambda: answers(f"{urls['api']}/"), _READY_S),
        Step("trainer", trainer, (lambda: _is_run(folder)) if waits else is_served, _READY_S),
        Step("env", env, is_served, _READY_S),
    ]


def _env_settings(request: RunRequest, folder: Path) -> Path:
    """The environment samples just as the trainer was set: group size, temperature, model and all."""
    import yaml

    config: dict[str, Any] = yaml.safe_load((folder / "config.yaml").read_text())
    if "train.filter_equal_groups" not in request.settings:
        del config["train"]["filter_equal_groups"]  # the trainer leaves that to the environment
    config |= {"env": dict(request.env_settings), "openai": dict(request.server_settings)}
    if "total_steps" in config["env"]:  # the run may have been made longer since
        config["env"]["total_steps"] = config["train"]["max_steps"]
    path = folder / "env.yaml"
    write_text(path, yaml.safe_dump(config, sort_keys=False))
    return path


def _is_run(folder: Path) -> bool:
    """Whether the trainer has made the folder its own: run.json is the last that it writes to begin with."""
    return (folder / "run.json").is_file()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=_ASK_S) as response:
            return bool(response.status == 200)
    except (OSError, ValueError, http.client.HTTPException):
        return False


def has_all_batches(folder: Path, api_port: int) -> bool:
    """Whether the trainer has got its last batch: from then on it needs no environment."""
    import yaml

    try:
        steps = yaml.safe_load((folder / "config.yaml").read_text())["train"]["max_steps"]
        with urllib.request.urlopen(f"http://127.0.0.1:{api_port}/status", timeout=_ASK_S) as answer:
            return int(json.loads(answer.read())["current_step"]) >= steps
    except (OSError, ValueError, http.client.HTTPException):
        return False


def logs(folder: Path, parts: Mapping[str, Any] | list[str]) -> dict[str, Path]:
    """Where each part writes what it has to say."""
    return {part: folder / "logs" / f"{part}.log" for part in parts}
