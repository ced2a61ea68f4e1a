"""What the run manager was asked to run: kept in the run folder, and turned into the commands of its processes."""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from palestra.core import children
from palestra.core.config import RunConfig
from palestra.core.errors import PalestraError
from palestra.core.files import write_json, write_text
from palestra.core.http import HttpError, Request
from palestra.core.run_folder import RunFolder
from palestra.core.secrets import own_environment, redact
from palestra.runs.processes import RUN_VARIABLE

PALESTRA = [sys.executable, "-P", "-m", "palestra"]
_SECRET = re.compile(r"(api_?key|secret|passw(or)?d|credentials?|(access|auth|api|hf)_token|^token)$", re.IGNORECASE)
_PLACEHOLDERS = ("", "none", "x", "empty")  # values of an api_key that are no secret
_TRAINER_ONLY = {"WANDB_API_KEY", "TINKER_API_KEY"}
LOCAL_ONLY = ("train.tokens_per_micro_batch",)  # locks of the local trainer, which a Tinker server does not read
_HTTP_TIMEOUT_S = 2.0
_READY_S = 3600.0  # a model may have to be downloaded first; a process that dies is noticed at once


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What to train on, and how.

    `settings` are dotted keys of RunConfig, `env_settings` fields of the environment's own config, and
    `server_settings` what an Atropos environment is told about its inference server. `wire` says whether the
    environment runs in a process of its own; None: only if it must (Atropos). Without environment and agent
    file, the demo is trained.
    """

    environment: str | None = None
    environment_name: str | None = None  # how it is listed, where `environment` is a file
    agent_file: str | None = None
    agent_arguments: list[str] = field(default_factory=list)  # --agent-cmd, --cases, … as command-line arguments
    settings: Mapping[str, Any] = field(default_factory=dict)
    env_settings: Mapping[str, Any] = field(default_factory=dict)
    server_settings: Mapping[str, Any] = field(default_factory=dict)
    wire: bool | None = None
    name: str | None = None
    backend: str = "local"
    nproc: int = 1  # processes that train together, a GPU for each

    @property
    def subject(self) -> str:
        """The environment, the name of the agent file, or "demo"."""
        if self.environment is not None:
            return self.environment_name or self.environment
        return Path(self.agent_file).stem if self.agent_file else "demo"

    def check(self) -> None:
        """Refuse whatever can be seen to be wrong without running user code."""
        if self.environment is not None and self.agent_file is not None:
            raise PalestraError("train on an environment or on an agent file, not on both")
        if self.wire and self.environment is None:
            raise PalestraError("only an environment can run in a process of its own (wire); give one")
        if self.nproc > 1 and self.needs_wire():
            raise PalestraError(
                f"--nproc {self.nproc} shares problems among ranks, and an environment over the wire has none"
            )
        RunConfig.build(self.run_settings)
        for kind in ("settings", "env_settings", "server_settings"):
            refuse_secrets(getattr(self, kind), kind)

    @property
    def run_settings(self) -> dict[str, Any]:
        """The settings with the backend, which no setting overrides."""
        if self.backend == "local":
            return dict(self.settings)
        settings = {key: value for key, value in self.settings.items() if key not in LOCAL_ONLY}
        return settings | {"backend": self.backend}

    def needs_wire(self) -> bool:
        """Whether the environment runs in a process of its own. Reads source files, runs none of them."""
        if self.environment is None:
            return False
        return _dialect(self.environment) != "palestra" or bool(self.wire)

    def save(self, folder: RunFolder, cwd: Path) -> None:
        """request.json holds all of it; settings.yaml is the part that `--config` reads."""
        import yaml

        write_json(folder.request_file, {**asdict(self), "cwd": str(cwd)})
        sections = {"env": dict(self.env_settings), "openai": dict(self.server_settings)}
        content = self.run_settings | {name: section for name, section in sections.items() if section}
        write_text(folder.settings_file, yaml.safe_dump(content, sort_keys=False))

    @classmethod
    def load(cls, folder: RunFolder) -> tuple[RunRequest, Path]:
        """The request, and the working directory in which it was made."""
        data = json.loads(folder.request_file.read_text())
        cwd = Path(data.pop("cwd"))
        return cls(**data), cwd if cwd.is_dir() else folder.path


def refuse_secrets(settings: Mapping[str, Any], kind: str) -> None:
    """Settings are written to disk and shown; keys and passwords belong in environment variables."""
    for name, value in settings.items():
        has_secret_name = _SECRET.search(name) and isinstance(value, str) and value.lower() not in _PLACEHOLDERS
        if has_secret_name or redact(str(value)) != str(value):
            raise PalestraError(
                f"{kind}: {name} holds a secret, and settings are written to disk; set it as an environment variable"
            )


@dataclass(frozen=True)
class LaunchStep:
    """A process to start. `command` is called once all steps before it are ready, `is_ready` until it returns True."""

    part: str
    command: Callable[[], list[str]]
    is_ready: Callable[[], bool]
    ready_within_s: float = _READY_S


def launch_token(request: RunRequest, folder: RunFolder) -> str | None:
    """What a run's own processes prove themselves with. Environments written for Atropos cannot send it to the API."""
    needs_none = request.environment is None or not folder.wire.is_dir() or _dialect(request.environment) != "palestra"
    return None if needs_none else secrets.token_urlsafe(24)


def launch_steps(
    request: RunRequest, folder: RunFolder, claim_port: Callable[[str], int], token: str | None = None
) -> list[LaunchStep]:
    """One command for runs in one process; over the wire: trajectory API, trainer with its server, environment."""
    if folder.wire.is_dir():
        return _over_the_wire(request, folder, claim_port, token)
    return [_in_one_process(request, folder)]


def _in_one_process(request: RunRequest, folder: RunFolder) -> LaunchStep:
    ranks = ["--nproc", str(request.nproc)] if request.nproc > 1 else []

    def command() -> list[str]:
        if folder.has_begun:
            return [*PALESTRA, "train", "--trust", *ranks, "--resume", str(folder.path)]  # the index lists it
        subject = [*([request.agent_file] if request.agent_file else []), *request.agent_arguments]
        subject = ["--env", request.environment] if request.environment else subject
        return [*PALESTRA, "train", *ranks, *subject, *_first_start(folder)]

    return LaunchStep("trainer", command, lambda: folder.has_begun)


def _over_the_wire(
    request: RunRequest, folder: RunFolder, claim_port: Callable[[str], int], token: str | None
) -> list[LaunchStep]:
    assert request.environment is not None
    name, ports = request.environment, {part: claim_port(part) for part in ("api", "trainer")}
    urls = {part: f"http://127.0.0.1:{port}" for part, port in ports.items()}

    def trainer() -> list[str]:
        words = [*PALESTRA, "train", "--env-url", urls["api"], "--serve-port", str(ports["trainer"])]
        if folder.has_begun:
            return [*words, "--trust", "--resume", str(folder.path)]
        return [*words, "--env", name, *_first_start(folder)]

    def env() -> list[str]:
        where = ["--api-url", urls["api"], "--openai.base_url", f"{urls['trainer']}/v1"]
        config = write_env_settings(request, folder)
        return children.isolated("-m", "palestra", "env", "serve", name, *where, "--config", config)

    def model_is_served() -> bool:
        return answers(f"{urls['trainer']}/health", token)

    api = [*PALESTRA, "trajectory", "--port", str(ports["api"]), "--folder", str(folder.wire)]
    # our environments wait for the model by themselves, so both may load their libraries at once; others may not wait
    waits = _dialect(name) == "palestra"
    return [
        LaunchStep("api", lambda: api, lambda: answers(f"{urls['api']}/", token)),
        LaunchStep("trainer", trainer, (lambda: folder.has_begun) if waits else model_is_served),
        LaunchStep("env", env, model_is_served),
    ]


def _first_start(folder: RunFolder) -> list[str]:
    return ["--config", str(folder.settings_file), "--folder", str(folder.path)]


def write_env_settings(request: RunRequest, folder: RunFolder) -> Path:
    """The trainer's settings (group size, temperature, model, …), which sampling must follow, and the environment's."""
    import yaml

    config = folder.config.model_dump(mode="json")
    if "train.filter_equal_groups" not in request.settings:
        del config["train"]["filter_equal_groups"]  # over the wire it is the environment that filters
    config |= {"env": dict(request.env_settings), "openai": dict(request.server_settings)}
    if "total_steps" in config["env"]:  # the run may have been lengthened since
        config["env"]["total_steps"] = config["train"]["max_steps"]
    write_text(folder.env_settings_file, yaml.safe_dump(config, sort_keys=False))
    return folder.env_settings_file


def has_all_batches(folder: RunFolder, api_port: int, token: str | None = None) -> bool:
    """Whether the trainer has taken its last batch: from then on it needs no environment."""
    try:
        steps = folder.config.train.max_steps
        request = Request(f"http://127.0.0.1:{api_port}/status", token=token, timeout_s=_HTTP_TIMEOUT_S)
        return steps is not None and int(request.parse(request.send())["current_step"]) >= steps
    except (OSError, ValueError, HttpError):
        return False


def answers(url: str, token: str | None = None) -> bool:
    try:
        return Request(url, token=token, timeout_s=_HTTP_TIMEOUT_S).send().status == 200
    except HttpError:
        return False


def process_environment(part: str, run_id: str, request: RunRequest, token: str | None = None) -> dict[str, str]:
    """The environment variables of a run's process. `token` is that of the run's own servers."""
    allowed = {"WANDB_API_KEY"} if request.env_settings.get("use_wandb") else set()
    environ = own_environment(hide=_TRAINER_ONLY - allowed if part == "env" else ())
    environ |= {RUN_VARIABLE: run_id, "PYTHONUNBUFFERED": "1", "COLUMNS": "120"}
    return environ | ({"PALESTRA_TOKEN": token} if token else {})


def _dialect(environment: str) -> str:
    from palestra.envs.load import find_env

    return find_env(environment).dialect
