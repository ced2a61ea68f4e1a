"""A run as data: what to train on and how, written to request.json and executed by `python -m palestra.run`."""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from palestra.core import children
from palestra.core.config import RunConfig, without_removed
from palestra.core.errors import NotAllowedError, SettingError, UnreadableFileError
from palestra.core.files import read_regular, write_json
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
READY_S = 3600.0  # a model may have to be downloaded first; a process that dies is noticed at once


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What to train on, and how; plain JSON data.

    The task is one of: an environment with its settings; an agent file; a program or MCP servers with cases
    (`agent`, the options of `palestra train`); groups that environments post to `env_url`. Without any of these, the
    demo is trained. `settings` are dotted keys of RunConfig, `env_settings` fields of the environment's own config, and
    `server_settings` what an Atropos environment is told about its inference server. `wire` runs the environment in a
    process of its own; None: only if it must (Atropos).
    """

    environment: str | None = None
    environment_name: str | None = None  # how it is listed, where `environment` is a file
    agent_file: str | None = None
    agent: Mapping[str, Any] = field(default_factory=dict)  # --agent-cmd, --cases, …: the fields of AgentOptions
    settings: Mapping[str, Any] = field(default_factory=dict)
    env_settings: Mapping[str, Any] = field(default_factory=dict)
    server_settings: Mapping[str, Any] = field(default_factory=dict)
    packages: Sequence[str] = ()  # what an Atropos environment needs installed
    env_url: str | None = None
    serve_port: int = 9001  # where environments sample
    wait_limit_s: float = 60.0  # without a group over the wire, while the environment fails
    wire: bool | None = None
    name: str | None = None
    backend: str = "local"
    nproc: int = 1  # processes that train together, a GPU for each
    cwd: str = ""  # relative paths of user code are found from here
    api_port: int | None = None  # of a run over the wire, while it runs

    @property
    def subject(self) -> str:
        """The environment, the name of the agent file, or "demo"."""
        if self.environment is not None:
            return self.environment_name or self.environment
        return Path(self.agent_file).stem if self.agent_file else "demo"

    @property
    def only_learns_traces(self) -> bool:
        """Whether there is nothing to attempt: an sft stage alone, without an agent."""
        no_agent = self.environment is None and self.agent_file is None and not self.agent
        return no_agent and self.settings.get("stages.plan") == "sft"

    def check(self) -> RunConfig:
        """The settings as a config; PalestraError for all that is wrong without running user code."""
        if self.environment is not None and self.agent_file is not None:
            raise SettingError("train on an environment or on an agent file, not on both")
        if self.wire and self.environment is None:
            raise SettingError("only an environment can run in a process of its own (wire); give one")
        if self.nproc > 1 and self.needs_wire():
            raise SettingError(
                f"--nproc {self.nproc} shares problems among ranks, and an environment over the wire has none"
            )
        for kind in ("settings", "env_settings", "server_settings"):
            refuse_secrets(getattr(self, kind), kind)
        return self.config()

    def config(self, *own: Mapping[str, Any]) -> RunConfig:
        """The settings over those of the task itself: its agent file's, or those that suit its environment."""
        return RunConfig.build(*own, self.run_settings)

    @property
    def run_settings(self) -> dict[str, Any]:
        """The settings with the backend, which no setting overrides."""
        if self.backend == "local":
            return dict(self.settings)
        settings = {key: value for key, value in self.settings.items() if key not in LOCAL_ONLY}
        return settings | {"backend": self.backend}

    def needs_wire(self) -> bool:
        """Whether the environment runs in a process of its own. Reads source files, runs none of them."""
        return self.environment is not None and (bool(self.wire) or self.dialect != "palestra")

    @property
    def dialect(self) -> str:
        """Whose environment it is: "palestra" or "atropos"."""
        from palestra.envs.discover import find_env

        return find_env(self.environment).dialect if self.environment else "palestra"

    def save(self, folder: RunFolder) -> None:
        """Write request.json, with absolute paths: it is executed in another process."""
        cwd = self.cwd or str(Path.cwd())
        environment, agent_file = absolute_name(self.environment), absolute_name(self.agent_file)
        request = replace(self, cwd=cwd, environment=environment, agent_file=agent_file)
        write_json(folder.request_file, asdict(request))

    @classmethod
    def load(cls, file: Path) -> RunRequest:
        try:
            data = json.loads(read_regular(file))
            if words := data.pop("agent_arguments", None):  # of runs that an older version has queued
                data["agent"] = _options_of(words)
            data["packages"] = tuple(data.get("packages", ()))
            data["settings"] = without_removed(data.get("settings", {}), str(file))
            return cls(**data)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise UnreadableFileError(
                f"{file} does not hold a request for a run ({error}); restore it from a copy"
            ) from None

    @classmethod
    def of_run(cls, folder: RunFolder) -> RunRequest:
        """A request that continues a run which was started in a terminal: its run.json says what it trains on."""
        record = folder.record
        request = cls(name=record["name"], nproc=int(record.get("ranks", 1)), cwd=str(Path.cwd()))
        match record.get("atropos"):
            case {"file": str(file), "env": dict(env), "openai": dict(openai), "packages": list(packages)}:
                request = replace(request, environment=file, packages=tuple(packages))
                return replace(request, env_settings=env, server_settings=openai)
        if folder.wire_command:
            raise SettingError(
                f"{folder.path.name} trains on environments over the wire; continue it with: {folder.wire_command}"
            )
        return request


def absolute_name(name: str | None) -> str | None:
    """A file (or FILE:CLASS) with its absolute path, so that it is found from any folder; other names unchanged."""
    file, colon, class_name = (name or "").partition(":")
    return f"{Path(file).resolve()}{colon}{class_name}" if file.endswith(".py") else name


def _options_of(words: Sequence[str]) -> dict[str, Any]:
    """`["--cases", "a.jsonl", "--measure", "s.py:f"]` as the fields of AgentOptions."""
    options: dict[str, Any] = {}
    for option, value in zip(words[::2], words[1::2], strict=True):
        name = option.removeprefix("--").replace("-", "_")
        if name in ("measure", "mcp", "mcp_shared"):
            options.setdefault(name, []).append(value)
        else:
            options[name] = int(value) if name == "agent_port" else value
    return options


def refuse_secrets(settings: Mapping[str, Any], kind: str) -> None:
    """Settings are written to disk and shown; keys and passwords belong in environment variables."""
    for name, value in settings.items():
        has_secret_name = _SECRET.search(name) and isinstance(value, str) and value.lower() not in _PLACEHOLDERS
        if has_secret_name or redact(str(value)) != str(value):
            raise NotAllowedError(
                f"{kind}: {name} holds a secret, and settings are written to disk; set it as an environment variable"
            )


@dataclass(frozen=True)
class LaunchStep:
    """A process to start. `command` is called once all steps before it are ready, `is_ready` until it returns True."""

    part: str
    command: Callable[[], list[str]]
    is_ready: Callable[[], bool]


def launch_token(request: RunRequest, folder: RunFolder) -> str | None:
    """What a run's own processes prove themselves with. Environments written for Atropos cannot send it to the API."""
    return secrets.token_urlsafe(24) if folder.wire.is_dir() and request.dialect == "palestra" else None


def launch_steps(
    request: RunRequest, folder: RunFolder, claim_port: Callable[[str], int], token: str | None = None
) -> list[LaunchStep]:
    """One process; over the wire three: trajectory API, trainer with its inference server, environment."""
    file = str(folder.request_file)

    def ours(part: str) -> Callable[[], list[str]]:
        return lambda: [sys.executable, "-P", "-m", "palestra.run", file, part]

    if not folder.wire.is_dir():
        return [LaunchStep("trainer", ours("trainer"), lambda: folder.has_begun)]
    ports = {part: claim_port(part) for part in ("api", "trainer")}
    urls = {part: f"http://127.0.0.1:{port}" for part, port in ports.items()}
    replace(request, env_url=urls["api"], api_port=ports["api"], serve_port=ports["trainer"]).save(folder)

    def model_is_served() -> bool:
        return answers(f"{urls['trainer']}/health", token)

    # our environments wait for the model by themselves, so both may load their libraries at once; others may not wait
    waits = request.dialect == "palestra"
    return [
        LaunchStep("api", ours("api"), lambda: answers(f"{urls['api']}/", token)),
        LaunchStep("trainer", ours("trainer"), (lambda: folder.has_begun) if waits else model_is_served),
        LaunchStep("env", lambda: children.isolated("-m", "palestra.run", file, "env"), model_is_served),
    ]


def has_all_batches(folder: RunFolder, api_port: int, token: str | None = None) -> bool:
    """Whether all remaining batches are taken by the trainer, or wait for it: from then on it needs no environment."""
    try:
        train = folder.config.train
        request = Request(f"http://127.0.0.1:{api_port}/status", token=token, timeout_s=_HTTP_TIMEOUT_S)
        status = request.parse(request.send())
        waiting = int(status.get("queue_size", 0)) // train.problems_per_step
        return train.max_steps is not None and int(status["current_step"]) + waiting >= train.max_steps
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
