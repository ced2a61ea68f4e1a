"""The settings that an agent may edit: an environment's own fields and the settings of a run, with their types."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from palestra.core.config import RunConfig, flatten
from palestra.core.errors import PalestraError
from palestra.faces.rl_tools.answers import Refusal, short
from palestra.runs.locks import ServerLocks, Site, lifted_locks, type_name
from palestra.tools.arguments import find_mismatch

TRACKING_NAME = "wandb_name"
RUN_SEED = "run.seed"  # an environment has a seed of its own
_RENAMED = {"track.run_name": TRACKING_NAME, "seed": RUN_SEED}
# fields of an Atropos environment -> the settings of the trainer that must be equal
_SAME = {"group_size": "rollout.group_size", "total_steps": "train.max_steps"}
_WORDS = {"true": True, "false": False, "none": None, "null": None}


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
        """The value as this setting takes it; text is read as a number, a list, … where it can mean nothing else."""
        if isinstance(value, float) and not math.isfinite(value):
            raise self._refusal("should be a finite number", value)
        for candidate in _meanings(value):
            if find_mismatch(candidate, dict(self.schema), dict(self.schema)) is None:
                return candidate
        problem = find_mismatch(value, dict(self.schema), dict(self.schema)) or "does not fit"
        raise self._refusal(problem, value)

    def _refusal(self, problem: str, value: Any) -> Refusal:
        return Refusal(
            f"{self.name} {short(problem, 300)}; expected {self.type}",
            field=self.name,
            expected_type=self.type,
            got=short(json.dumps(value, ensure_ascii=False)),
        )


def _meanings(value: Any) -> Iterable[Any]:
    """The value itself first; then, for a text, what it says; a whole number may be written 5.0."""
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


def env_fields(rows: Iterable[Mapping[str, Any]], dialect: str) -> dict[str, ConfigField]:
    """The environment's own fields, as `envs.config_fields` describes them."""
    same = _SAME if dialect == "atropos" else {}
    return {row["name"]: ConfigField(**row, also=same.get(row["name"])) for row in rows}


@cache
def _run_fields() -> tuple[ConfigField, ...]:
    whole = RunConfig.model_json_schema()
    found = []
    for key, info in RunConfig.settings().items():
        section, _, name = key.rpartition(".")
        model = whole["$defs"][whole["properties"][section]["$ref"].rpartition("/")[2]] if section else whole
        default = info.get_default(call_default_factory=True)
        kind = type_name(info.annotation)
        found.append(
            ConfigField(_RENAMED.get(key, key), kind, default, info.description or "", model["properties"][name], key)
        )
    return tuple(found)


def run_fields(run_settings: Mapping[str, Any]) -> dict[str, ConfigField]:
    """The settings of a run. Their defaults are those that the environment says suit it."""
    own = flatten(dict(run_settings))
    return {
        field.name: replace(field, default=own[field.setting]) if field.setting in own else field
        for field in _run_fields()
    }


def server_fields(site: Site, names: Iterable[str]) -> dict[str, ConfigField]:
    """What the site has unlocked of the server's settings: `server.timeout`."""
    schemas = ServerLocks.model_json_schema()["properties"]
    lifted = [lock for lock in lifted_locks(site) if lock.section == "server" and lock.name in names]
    found = [
        ConfigField(lock.full_name, lock.type, lock.value, lock.description, schemas[lock.name], is_server=True)
        for lock in lifted
        if getattr(site.server, lock.name) is None
    ]
    return {field.name: field for field in found}


def require_valid(settings: Mapping[str, Any], run_settings: Mapping[str, Any], field: ConfigField) -> None:
    """The run's config as a whole: what single types cannot say."""
    try:
        RunConfig.build(run_settings, settings)
    except PalestraError as error:
        raise Refusal(f"{field.name}: {error}", field=field.name, expected_type=field.type) from None
