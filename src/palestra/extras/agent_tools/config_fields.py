"""The settings of a run, and the config fields of an environment: read in a process that has none of our secrets."""

from __future__ import annotations

import json
import math
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from palestra.agents.tools.run import find_mismatch
from palestra.core.config import RunConfig
from palestra.core.errors import MissingPackageError, PalestraError, ResourceError, UserCodeError, missing_package
from palestra.core.extras import provided
from palestra.core.secrets import clean_environment
from palestra.envs.child_process import ChildFailed, ChildProcess, ChildTimeout
from palestra.envs.discover import DiscoveredEnv, package_of
from palestra.extras.agent_tools.answers import Refusal, short
from palestra.extras.agent_tools.locks import RequestLimits, type_name

Progress = Callable[[float, float, str], None]  # done, total, what is being done
TRACKING_NAME = "wandb_name"
_RENAMED = {"track.run_name": TRACKING_NAME, "seed": "run.seed"}  # an environment has a seed of its own
_WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}  # in any case -> JSON
_DESCRIBED_AT_ONCE = threading.BoundedSemaphore(4)  # each starts a process
_DESCRIBE_WAIT_S = 60.0


@dataclass(frozen=True)
class ConfigField:
    """One setting. `setting` is the key of the run's config that it is, None for a field of the environment;
    `also` is the key that must have the same value, where trainer and environment are separate programs."""

    name: str
    type: str
    default: Any
    description: str
    schema: Mapping[str, Any]
    setting: str | None = None
    also: str | None = None
    is_server: bool = False  # of the server that an environment in another program samples from

    @property
    def key(self) -> str | None:
        """The key of the run's config that this decides, if any."""
        return self.setting or self.also

    @property
    def is_own(self) -> bool:
        """Whether it is a field of the environment itself."""
        return self.setting is None and not self.is_server

    def read(self, value: Any) -> Any:
        """Convert a value to the setting's type; text is parsed only if it is unambiguous."""
        problem = "should be a finite number"
        if not isinstance(value, float) or math.isfinite(value):
            for candidate in _meanings(value):
                if find_mismatch(candidate, dict(self.schema)) is None:
                    return candidate
            problem = find_mismatch(value, dict(self.schema)) or "does not fit"
        raise Refusal(
            f"{self.name}: {short(problem, 300)}; expected {self.type}",
            field=self.name,
            expected_type=self.type,
            got=short(json.dumps(value, ensure_ascii=False)),
        )


def _meanings(value: Any) -> Iterable[Any]:
    """Candidates for a value: itself, a text parsed as JSON, a float as a whole number."""
    yield value
    if isinstance(value, str):
        try:
            value = json.loads(_WORDS.get(value.strip().lower(), value))
        except (ValueError, RecursionError):
            return
        if isinstance(value, str) or (isinstance(value, float) and not math.isfinite(value)):
            return
        yield value
    if isinstance(value, float) and value.is_integer():
        yield int(value)


@cache
def run_fields() -> tuple[ConfigField, ...]:
    """The settings of a run, with their own defaults."""
    whole = RunConfig.model_json_schema()
    rows = []
    for key, info in RunConfig.settings().items():
        section, _, name = key.rpartition(".")
        model = whole["$defs"][whole["properties"][section]["$ref"].rpartition("/")[2]] if section else whole
        kind, default = type_name(info.annotation), info.get_default(call_default_factory=True)
        schema = model["properties"][name]
        rows.append(ConfigField(_RENAMED.get(key, key), kind, default, info.description or "", schema, key))
    return tuple(rows)


@dataclass(frozen=True)
class EnvDescription:
    """The config of an environment: one row per field, and the settings of a training that suit it."""

    fields: list[dict[str, Any]]  # name, type, default (the environment's own), description, schema
    run_settings: dict[str, Any]


def describe(
    env: DiscoveredEnv,
    settings: Mapping[str, Any] | None = None,
    limits: RequestLimits | None = None,
    progress: Progress = lambda done, total, text: None,
) -> EnvDescription:
    """The environment's config with `settings` laid over it, and the settings of a training that suit it.

    For an Atropos environment, atroposlib is installed first. If it then lacks a package, those that the file
    requirements.txt of its folder lists are installed, too. Both continue if the client gives up waiting.
    """
    timeout_s = 60 * (limits or RequestLimits()).config_minutes
    if env.dialect == "palestra":
        return describe_env(env, settings, timeout_s=timeout_s)
    venvs = provided("venvs of Atropos environments")
    error, package, lines, listed = None, "", count(1), venvs.requirements_of(env.file_path)

    def tell(text: str) -> None:
        line = next(lines)
        progress(line / (line + 50), 1.0, short(text, 200))  # pip does not say how much there is to do

    for packages in [[], listed] if listed else [[]]:
        python = venvs.ensure_python(venvs.venv_folder(), packages, tell, tell)
        tell(f"reading the config of {env.name}")
        try:
            described = describe_env(env, settings, timeout_s=timeout_s, python=python)
            of_wire = provided("settings of runs over the wire")
            return replace(described, run_settings={**of_wire, **described.run_settings})
        except PalestraError as failure:
            error, package = failure, missing_package(str(failure)) or ""
            if not package:
                raise
    raise MissingPackageError(
        f"{error}; if {package} is a package, whoever runs this server can install it: "
        f"add it to {env.file_path.parent / 'requirements.txt'}"
    )


def describe_env(
    env: DiscoveredEnv, settings: Mapping[str, Any] | None = None, timeout_s: float = 180, python: Path | None = None
) -> EnvDescription:
    """Ask the environment for its config, with `settings` laid over it; what does not fit raises PalestraError.

    `python` is an interpreter with the packages that the environment imports; by default ours.
    """
    if not _DESCRIBED_AT_ONCE.acquire(timeout=_DESCRIBE_WAIT_S):
        raise ResourceError("this server is reading the settings of too many environments; ask again in a minute")
    try:
        package, roots = package_of(env.file_path)
        names = {"file": str(env.file_path), "class_name": env.class_name, "roots": [str(root) for root in roots]}
        settings = {**env.preset, **(settings or {})}
        with tempfile.TemporaryDirectory() as home, tempfile.TemporaryFile() as stderr:
            environ, functions = clean_environment() | {"HOME": home}, Path(__file__).with_name("describe_child.py")
            with closing(ChildProcess(functions, python or sys.executable, environ, home, stderr)) as child:
                answer = child.ask("describe", timeout_s, settings=settings, package=package, **names)
        return EnvDescription(list(answer["fields"]), dict(answer["run_settings"]))
    except ChildTimeout as error:
        raise UserCodeError(
            f"the config of {env.name} cannot be read: {error}. If this machine is busy, try again or raise "
            "limits.config_minutes in the site file; otherwise import and config_init should load no data or model"
        ) from None
    except (ChildFailed, TypeError, KeyError, ValueError) as error:
        raise UserCodeError(f"the config of {env.name} cannot be read: {error}") from None
    finally:
        _DESCRIBED_AT_ONCE.release()
