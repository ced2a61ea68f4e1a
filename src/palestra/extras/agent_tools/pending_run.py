"""The run that a client prepares: the selected environment, its editable settings and its locks."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from palestra.agents.tools.run import find_mismatch
from palestra.core.config import RunConfig, flatten
from palestra.core.errors import (
    MissingPackageError,
    PalestraError,
    ResourceError,
    UserCodeError,
    did_you_mean,
    missing_package,
)
from palestra.core.extras import provided
from palestra.core.files import slug
from palestra.envs.discover import DiscoveredEnv
from palestra.envs.load import EnvDescription, describe_env
from palestra.extras.agent_tools.answers import Refusal, closest, short
from palestra.runs.agent_settings import KEYS_OF_ADDRESSES, is_hub_name, refuse_keys_for_unknown_hosts
from palestra.runs.locks import (
    THE_MODEL,
    Lock,
    RequestLimits,
    ServerLocks,
    Site,
    as_setting,
    lifted_locks,
    locked_settings,
    locks_of,
    short_names,
    type_name,
)
from palestra.runs.manager import RunRequest
from palestra.runs.request import LOCAL_ONLY

Progress = Callable[[float, float, str], None]  # done, total, what is being done
TRACKING_NAME = "wandb_name"
RUN_SEED = "run.seed"  # an environment has a seed of its own
_RENAMED = {"track.run_name": TRACKING_NAME, "seed": RUN_SEED}
# fields of an Atropos environment -> the settings of the trainer that must be equal
_SAME = {"group_size": "rollout.group_size", "total_steps": "train.max_steps"}
_OF_TRAINER = ("batch_size",)  # fields of an Atropos environment that the trainer overwrites with its own setting
_USUAL = {
    "model.name", "train.max_steps", "train.learning_rate", "train.problems_per_step", "rollout.group_size",
    "rollout.max_new_tokens", "rollout.temperature", "rollout.max_tool_rounds", "lora.r", "train.loss", "train.beta",
    "echo.coefficient", "stages.plan", "eval.every", "checkpoint.every", "track.report_to", "track.run_name", "seed",
}  # fmt: skip
_WORDS = {"true": True, "false": False, "none": None, "null": None}
_MAX_VALUE_CHARS = 10_000
_SERVER_SETTINGS = ("timeout", "num_requests_for_eval", "server_type")  # the rest is the trainer's
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

    def read(self, value: Any) -> Any:
        """Convert a value to the setting's type; text is parsed only if it is unambiguous."""
        if isinstance(value, float) and not math.isfinite(value):
            raise self._refusal("should be a finite number", value)
        for candidate in _meanings(value):
            if find_mismatch(candidate, dict(self.schema)) is None:
                return candidate
        problem = find_mismatch(value, dict(self.schema)) or "does not fit"
        raise self._refusal(problem, value)

    def _refusal(self, problem: str, value: Any) -> Refusal:
        return Refusal(
            f"{self.name}: {short(problem, 300)}; expected {self.type}",
            field=self.name,
            expected_type=self.type,
            got=short(json.dumps(value, ensure_ascii=False)),
        )


def _meanings(value: Any) -> Iterable[Any]:
    """Candidates for a value: itself, a text parsed as JSON, a float as a whole number."""
    yield value
    parsed = value
    if isinstance(value, str):
        try:
            parsed = _WORDS[value.strip().lower()] if value.strip().lower() in _WORDS else json.loads(value)
        except (ValueError, RecursionError):
            return
        if isinstance(parsed, float) and not math.isfinite(parsed):
            return
        if not isinstance(parsed, str):
            yield parsed
    if isinstance(parsed, float) and parsed.is_integer():
        yield int(parsed)


@cache
def run_fields() -> tuple[ConfigField, ...]:
    """The settings of a run, with their own defaults."""
    whole = RunConfig.model_json_schema()
    rows = []
    for key, info in RunConfig.settings().items():
        section, _, name = key.rpartition(".")
        model = whole["$defs"][whole["properties"][section]["$ref"].rpartition("/")[2]] if section else whole
        default = info.get_default(call_default_factory=True)
        kind = type_name(info.annotation)
        rows.append(
            ConfigField(_RENAMED.get(key, key), kind, default, info.description or "", model["properties"][name], key)
        )
    return tuple(rows)


def server_fields(site: Site) -> dict[str, ConfigField]:
    """The server settings that the site unlocks, such as `server.timeout`."""
    schemas = ServerLocks.model_json_schema()["properties"]
    return {
        lock.full_name: ConfigField(
            lock.full_name, lock.type, lock.value, lock.description, schemas[lock.name], is_server=True
        )
        for lock in lifted_locks(site)
        if lock.section == "server" and lock.name in _SERVER_SETTINGS and getattr(site.server, lock.name) is None
    }


@dataclass(frozen=True)
class PendingRunConfig:
    """The environment, its fields, the locks, and the edited values. Immutable: an edit returns a new one."""

    env: DiscoveredEnv
    run_settings: Mapping[str, Any]  # what the environment says suits it
    fields: Mapping[str, ConfigField]
    site: Site
    locks: tuple[Lock, ...]
    edited: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, env: DiscoveredEnv, description: EnvDescription, site: Site) -> PendingRunConfig:
        try:
            RunConfig.build(description.run_settings)
        except PalestraError as error:
            text = f"the run_settings of {env.name} ({env.file_path}) are wrong: {error}"
            raise UserCodeError(text) from None
        stamp = time.strftime("%Y%m%d-%H%M%S")
        linked, dropped = (_SAME, _OF_TRAINER) if env.dialect == "atropos" else ({}, ())
        own = {
            row["name"]: ConfigField(**row, also=linked.get(row["name"]))
            for row in description.fields
            if row["name"] not in dropped
        }
        same = {f.also for f in own.values()}
        suited = flatten(dict(description.run_settings))  # the environment's own defaults for settings of the run
        fields = {
            f.name: replace(f, default=suited[f.setting]) if f.setting in suited else f
            for f in run_fields()
            if f.setting not in same
        } | own
        if env.dialect == "atropos":
            fields |= server_fields(site)
        locks = tuple(lock for lock in locks_of(site) if _holds_something(lock, own, env.dialect, site))
        edited: dict[str, Any] = {TRACKING_NAME: f"{slug(env.name)}-{stamp}"}
        if "use_wandb" in own and env.dialect == "atropos":
            edited["use_wandb"] = False  # the trainer tracks, by track.report_to
        for f in fields.values():
            largest = site.maximums.get(f.key or "")
            if largest is not None and (f.default is None or f.default > largest):
                edited[f.name] = type(f.default)(largest) if f.default is not None else int(largest)
        return cls(env, description.run_settings, fields, site, locks, edited)

    def edit(self, name: str, value: Any) -> PendingRunConfig:
        """The same with one setting changed; Refusal says why not."""
        name, value = self.own_name(name), self._own_value(name, value)
        lock = self.lock_of(name)
        if lock is not None:
            raise Refusal(
                f"{short(name)} is locked by this site ({lock.full_name}); choose another setting to change",
                field=short(name),
                locked_value=self.locked_value(lock),
            )
        own = self.fields.get(name)
        if own is None:
            available = [f.name for f in self.open_fields()]
            raise Refusal(
                f"there is no field {short(name)!r}.{did_you_mean(name[:200], available)} rl_get_current_config lists "
                f"all {len(available)}",
                available_fields=closest(name, available),
            )
        if len(json.dumps(value)) > _MAX_VALUE_CHARS:
            raise Refusal(f"{name} takes at most {_MAX_VALUE_CHARS} characters; expected {own.type}", field=name)
        read = own.read(value)
        largest = self.site.maximums.get(own.key or "")
        if largest is not None and (read is None or read > largest):
            raise Refusal(f"{name} is at most {largest:g} at this site, got {short(read)}", field=name, maximum=largest)
        if own.key == "model.name" and "model.name" not in self.site.unlock and not is_hub_name(str(read)):
            raise Refusal(
                f"{name} takes the name of a hub model here, such as Qwen/Qwen3-0.6B, got {short(read)}; "
                "the site file allows paths with unlock: [model.name]",
                field=name,
            )
        draft = replace(self, edited={**self.edited, name: read})
        if own.key is not None:
            try:
                RunConfig.build(self.run_settings, draft.settings())
            except PalestraError as error:
                raise Refusal(f"{name}: {error}", field=name, expected_type=own.type) from None
        return draft

    def own_name(self, name: str) -> str:
        """The field that a short name of other trainers stands for, if no field and no lock has that name."""
        key = short_names().get(name, name)
        return key if key in self.fields and name not in self.fields and self.lock_of(name) is None else name

    def _own_value(self, name: str, value: Any) -> Any:
        key = self.own_name(name)
        if key == name:
            return value
        if name != "batch_size":
            return as_setting(key, value)
        size = next(f.name for f in self.fields.values() if f.key == "rollout.group_size")
        attempts, group_size = self.fields[key].read(value), self.value(size)
        if group_size is None:
            raise Refusal(f"batch_size counts attempts: set {size} first", field=name)
        if attempts % group_size:
            raise Refusal(
                f"batch_size counts attempts: expected a multiple of {size} = {group_size}; {key} counts problems",
                field=name,
            )
        return attempts // group_size

    def lock_of(self, name: str) -> Lock | None:
        """The lock that holds a name: of the environment's own field, by its full name, or of a setting of the run."""
        own = self.fields.get(name)
        for lock in self.locks:
            by_setting = own is not None and own.key == lock.setting is not None and lock.value != THE_MODEL
            by_name = lock.name == name and (own is None or (own.setting is None and lock.section == "env"))
            if by_setting or by_name or lock.full_name == name:
                return lock
        return None

    def locked_value(self, lock: Lock) -> Any:
        if not lock.imposed:
            return self.fields[lock.name].default
        return self.value("model.name") if lock.value == THE_MODEL else lock.value

    def shown_locks(self) -> list[Lock]:
        """The locks whose settings have an effect with the current values."""
        backend, server = self.value("backend"), self.value("vllm.mode") == "server"
        effective = {
            "ray.address": backend == "ray",
            "tinker.base_url": backend == "tinker",
            "vllm.url": server,
            "rollout.weights_folder": server or self.value("rollout.policy_url") is not None,
            "track.entity": "wandb" in self.value("track.report_to"),
            "track.project": bool(self.value("track.report_to")),
        }
        return [lock for lock in self.locks if effective.get(lock.setting or "", True)]

    def open_fields(self) -> list[ConfigField]:
        """The environment's own first, then the run's, the usual ones before the others, without the locked ones."""

        own = [f for f in self.fields.values() if f.setting is None and not f.is_server]
        rest = [f for f in self.fields.values() if f.setting is not None or f.is_server]
        ordered = own + sorted(rest, key=lambda f: f.setting not in _USUAL)
        return [f for f in ordered if self.lock_of(f.name) is None]

    def value(self, name: str) -> Any:
        key, held = self.fields[name].key, locked_settings(list(self.locks))
        if key in held:
            return held[key]
        return self.edited.get(name, self.fields[name].default)

    def settings(self) -> dict[str, Any]:
        """The edited and the locked settings of the run, by their own keys."""
        changed = {self.fields[n].setting: v for n, v in self.edited.items() if n in self.fields}
        same = {f.also: self.value(f.name) for f in self.fields.values()}
        settings = {key: value for key, value in (changed | same).items() if key is not None}
        named = {"track.run_name": self.edited[TRACKING_NAME]}
        return {**settings, **named, **locked_settings(list(self.locks))}

    def env_settings(self) -> dict[str, Any]:
        """The edited and the locked fields of the environment itself."""
        own = {name: f for name, f in self.fields.items() if f.setting is None and not f.is_server}
        locked = {lock.name: lock.value for lock in self.locks if lock.section == "env" and not lock.is_open}
        shared = {name: self.value(name) for name, f in own.items() if f.also}
        values = {**self.edited, **shared, **locked}
        return {name: value for name, value in values.items() if name in own}

    def config(self) -> dict[str, Any]:
        """The environment's fields with their values, and the changed settings of the run."""
        return {f.name: self.value(f.name) for f in self.open_fields() if f.setting is None or f.name in self.edited}

    @property
    def environment(self) -> str:
        """The environment as other processes name it: by file and class, unless it is built in."""
        if self.env.origin == "built-in":
            return self.env.name
        return f"{self.env.file_path}:{self.env.class_name}"

    def request(self) -> RunRequest:
        """The request to the run manager; PalestraError if it would send a key to an address that an agent chose."""
        chosen = {key: self.edited[key] for key in KEYS_OF_ADDRESSES if key in self.edited}
        refuse_keys_for_unknown_hosts(chosen, self.site.run)
        locked = {lock.name: lock.value for lock in self.locks if lock.section == "server"}
        lifted = {f.name.removeprefix("server."): self.value(f.name) for f in self.fields.values() if f.is_server}
        return RunRequest(
            environment=self.environment,
            environment_name=self.env.name,
            settings=self.settings(),
            env_settings=self.env_settings(),
            server_settings={name: value for name, value in (locked | lifted).items() if name in _SERVER_SETTINGS},
            name=slug(self.env.name),
            backend=self.site.profile,
        )


def _holds_something(lock: Lock, own: Mapping[str, ConfigField], dialect: str, site: Site) -> bool:
    """Whether anything reads the setting. An environment of ours has no server between itself and the model."""
    if site.profile == "tinker" and lock.setting in LOCAL_ONLY:
        return False
    if dialect == "palestra" and lock.value == THE_MODEL:
        return False
    if lock.section == "server" and lock.setting is None:
        return dialect == "atropos" and lock.name in (*_SERVER_SETTINGS, "base_url")
    return lock.setting is not None or lock.name in own


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
        return _read_config(env, settings, timeout_s)
    venvs = provided("venvs of Atropos environments")
    error, package, lines, listed = None, "", count(1), venvs.requirements_of(env.file_path)

    def tell(text: str) -> None:
        line = next(lines)
        progress(line / (line + 50), 1.0, short(text, 200))  # pip does not say how much there is to do

    for packages in [[], listed] if listed else [[]]:
        python = venvs.ensure_python(venvs.venv_folder(), packages, tell, tell)
        tell(f"reading the config of {env.name}")
        try:
            described = _read_config(env, settings, timeout_s, python)
            return replace(
                described, run_settings={**provided("settings of runs over the wire"), **described.run_settings}
            )
        except PalestraError as failure:
            error, package = failure, missing_package(str(failure)) or ""
            if not package:
                raise
    raise MissingPackageError(
        f"{error}; if {package} is a package, whoever runs this server can install it: "
        f"add it to {env.file_path.parent / 'requirements.txt'}"
    )


def _read_config(
    env: DiscoveredEnv, settings: Mapping[str, Any] | None, timeout_s: float, python: Path | None = None
) -> EnvDescription:
    if not _DESCRIBED_AT_ONCE.acquire(timeout=_DESCRIBE_WAIT_S):
        raise ResourceError("this server is reading the settings of too many environments; ask again in a minute")
    try:
        return describe_env(env, settings, timeout_s=timeout_s, python=python)
    finally:
        _DESCRIBED_AT_ONCE.release()
