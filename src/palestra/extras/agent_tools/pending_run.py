"""The run that a client prepares: the selected environment, its editable settings and its locks."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from palestra.core.config import RunConfig, flatten
from palestra.core.errors import PalestraError, UserCodeError, did_you_mean
from palestra.core.files import slug
from palestra.envs.discover import DiscoveredEnv
from palestra.extras.agent_tools.answers import Refusal, closest, short
from palestra.extras.agent_tools.config_fields import TRACKING_NAME, ConfigField, EnvDescription, run_fields
from palestra.extras.agent_tools.locks import (
    SHORT_NAMES,
    THE_MODEL,
    Lock,
    ServerLocks,
    Site,
    as_setting,
    is_hub_name,
    lifted_locks,
    locked_settings,
    locks_of,
    refuse_keys_for_unknown_hosts,
)
from palestra.runs.manager import RunRequest
from palestra.runs.request import LOCAL_ONLY

# fields of an Atropos environment -> the settings of the trainer that must be equal
_SAME = {"group_size": "rollout.group_size", "total_steps": "train.max_steps"}
_OF_TRAINER = ("batch_size",)  # fields of an Atropos environment that the trainer overwrites with its own setting
_USUAL = {
    "model.name", "train.max_steps", "train.learning_rate", "train.problems_per_step", "rollout.group_size",
    "rollout.max_new_tokens", "rollout.temperature", "rollout.max_tool_rounds", "lora.r", "train.loss", "train.beta",
    "echo.coefficient", "stages.plan", "eval.every", "checkpoint.every", "track.report_to", "track.run_name", "seed",
}  # fmt: skip
_MAX_VALUE_CHARS = 10_000
_SERVER_SETTINGS = ("timeout", "num_requests_for_eval", "server_type")  # the rest is the trainer's


def _server_fields(site: Site) -> dict[str, ConfigField]:
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
            raise UserCodeError(f"the run_settings of {env.name} ({env.file_path}) are wrong: {error}") from None
        is_atropos = env.dialect == "atropos"
        rows = [row for row in description.fields if not (is_atropos and row["name"] in _OF_TRAINER)]
        own = {row["name"]: ConfigField(**row, also=_SAME.get(row["name"]) if is_atropos else None) for row in rows}
        same = {f.also for f in own.values()}
        suited = flatten(dict(description.run_settings))  # the environment's own defaults for settings of the run
        fields = {
            f.name: replace(f, default=suited.get(str(f.setting), f.default))
            for f in run_fields()
            if f.setting not in same
        }
        fields |= own | (_server_fields(site) if is_atropos else {})
        locks = tuple(lock for lock in locks_of(site) if _holds_something(lock, own, env.dialect, site))
        edited: dict[str, Any] = {TRACKING_NAME: f"{slug(env.name)}-{time.strftime('%Y%m%d-%H%M%S')}"}
        if "use_wandb" in own and is_atropos:
            edited["use_wandb"] = False  # the trainer tracks, by track.report_to
        for f in fields.values():
            largest = site.maximums.get(f.key or "")
            if largest is not None and (f.default is None or f.default > largest):
                edited[f.name] = type(f.default)(largest) if f.default is not None else int(largest)
        return cls(env, description.run_settings, fields, site, locks, edited)

    def edit(self, name: str, value: Any) -> PendingRunConfig:
        """The same with one setting changed; Refusal says why not."""
        name, value = self.own_name(name), self._own_value(name, value)
        if (lock := self.lock_of(name)) is not None:
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
        key = SHORT_NAMES.get(name, name)
        return key if key in self.fields and name not in self.fields and self.lock_of(name) is None else name

    def _own_value(self, name: str, value: Any) -> Any:
        key = self.own_name(name)
        if key == name or name != "batch_size":
            return value if key == name else as_setting(key, value)
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

    def locked_rows(self) -> list[dict[str, Any]]:
        """The locks that have an effect, as they are shown."""
        return [
            {"name": lock.full_name, "type": lock.type, "description": lock.description}
            | dict.fromkeys(("default", "locked_value"), self.locked_value(lock))
            for lock in self.shown_locks()
        ]

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
        ordered = sorted(self.fields.values(), key=lambda f: 0 if f.is_own else 1 if f.setting in _USUAL else 2)
        return [f for f in ordered if self.lock_of(f.name) is None]

    def value(self, name: str) -> Any:
        key, held = self.fields[name].key, locked_settings(self.locks)
        return held[key] if key in held else self.edited.get(name, self.fields[name].default)

    def settings(self) -> dict[str, Any]:
        """The edited and the locked settings of the run, by their own keys."""
        changed = {self.fields[n].setting: v for n, v in self.edited.items() if n in self.fields}
        same = {f.also: self.value(f.name) for f in self.fields.values()}
        settings = {key: value for key, value in (changed | same).items() if key is not None}
        return settings | {"track.run_name": self.edited[TRACKING_NAME]} | locked_settings(self.locks)

    def env_settings(self) -> dict[str, Any]:
        """The edited and the locked fields of the environment itself."""
        own = {name: f for name, f in self.fields.items() if f.is_own}
        locked = {lock.name: lock.value for lock in self.locks if lock.section == "env" and not lock.is_open}
        values = {**self.edited, **{name: self.value(name) for name, f in own.items() if f.also}, **locked}
        return {name: value for name, value in values.items() if name in own}

    def config(self) -> dict[str, Any]:
        """The environment's fields with their values, and the changed settings of the run."""
        return {f.name: self.value(f.name) for f in self.open_fields() if f.setting is None or f.name in self.edited}

    @property
    def environment(self) -> str:
        """The environment as other processes name it: by file and class, unless it is built in."""
        return self.env.name if self.env.origin == "built-in" else f"{self.env.file_path}:{self.env.class_name}"

    def request(self) -> RunRequest:
        """The request to the run manager; PalestraError if it would send a key to an address that an agent chose."""
        refuse_keys_for_unknown_hosts(self.edited, self.site.run)
        server = {lock.name: lock.value for lock in self.locks if lock.section == "server"}
        server |= {f.name.removeprefix("server."): self.value(f.name) for f in self.fields.values() if f.is_server}
        return RunRequest(
            environment=self.environment,
            environment_name=self.env.name,
            settings=self.settings(),
            env_settings=self.env_settings(),
            server_settings={name: value for name, value in server.items() if name in _SERVER_SETTINGS},
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
