"""An environment by its name or its file, ready to run."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from palestra.core import extras
from palestra.core.config import explain, without_removed
from palestra.core.errors import (
    InputError,
    NotFoundError,
    SettingError,
    UnsupportedError,
    UserCodeError,
    did_you_mean,
    text_of,
)
from palestra.core.files import import_file
from palestra.envs.discover import LIBRARY, DiscoveredEnv, discover, in_file
from palestra.envs.env import Env
from palestra.envs.running import RunningEnv

LIBRARIES = ("gymnasium", "openenv", "verifiers")  # whose environments have names such as gymnasium:ID
_WANTED = "An environment file defines a subclass of palestra.Env"


def find_env(name_or_file: str) -> DiscoveredEnv:
    """`calculator`, `my_env.py`, `my_env.py:Class` where a file has several, or `gymnasium:ID` of another library."""
    file, _, class_name = name_or_file.partition(":")
    if file in LIBRARIES and class_name:
        cls = _named(file)
        about = (cls.__doc__ or "").strip().splitlines()[0]
        path = Path(inspect.getfile(cls))
        return DiscoveredEnv(name_or_file, cls.__name__, path, about, "built-in", preset={"target": class_name})
    if not file.endswith(".py"):
        return discover().named(name_or_file)
    path = Path(file).resolve()
    if not path.is_file():
        near = did_you_mean(path.name, [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else [])
        raise NotFoundError(f"there is no environment file {file}.{near}")
    entries = [env for env in in_file(path) if class_name in ("", env.class_name)]
    if not entries:
        raise InputError(f"{file} defines no environment{class_name and f' {class_name}'}. {_WANTED}")
    if len(entries) > 1:
        choices = ", ".join(f"{file}:{env.class_name}" for env in entries)
        raise SettingError(f"{file} defines several environments; name one: {choices}")
    return entries[0]


def load_env(name_or_file: str, settings: Mapping[str, Any] | None = None) -> RunningEnv:
    """Find, import, configure and set up an environment. `settings` are fields of its config, as text or values."""
    entry = find_env(name_or_file)
    cls = env_class(entry)
    config = configure(cls, {**entry.preset, **(settings or {})})
    return RunningEnv(cls(config))


def env_class(entry: DiscoveredEnv) -> type[Env]:
    """Import the class. Built-in ones are modules of Palestra, all others are separate files."""
    if entry.dialect != "palestra":
        raise UnsupportedError(
            f"{entry.file_path} is written for {entry.dialect}; run it as a separate service: "
            f"palestra env run-{entry.dialect} {entry.file_path}"
        )
    if entry.name.partition(":")[0] in LIBRARIES:
        return _named(entry.name.partition(":")[0])
    if entry.file_path.is_relative_to(LIBRARY):
        module = extras.load(f"environments.{entry.file_path.stem}", entry.name)
    else:
        module = import_file(entry.file_path, str(entry.file_path), _WANTED)
    cls = getattr(module, entry.class_name, None)
    if not isinstance(cls, type) or not issubclass(cls, Env):
        raise UserCodeError(f"{entry.file_path}: {entry.class_name} is not a subclass of palestra.Env when it runs")
    return cls


def _named(library: str) -> type[Env]:
    """The environment that makes those of another library by name."""
    return extras.provided("environments of other libraries")[library]


def configure(cls: type[Env], settings: Mapping[str, Any]) -> Any:
    """The environment's own config with single fields changed; an error for a wrong name or value lists the fields."""
    try:
        config = cls.config_init()
    except Exception as error:
        raise UserCodeError(f"{cls.__name__}.config_init raised {text_of(error)}") from error
    if not isinstance(config, BaseModel):
        kind = type(config).__name__
        raise UserCodeError(f"{cls.__name__}.config_init returned a {kind}; expected a pydantic model")
    fields = list(type(config).model_fields)
    unknown = {f"env.{name}": value for name, value in settings.items() if name not in fields}
    for key in without_removed(unknown, cls.__name__):
        name = key.removeprefix("env.")
        raise SettingError(
            f"unknown setting {key!r}.{did_you_mean(name, fields)} This environment has: {', '.join(fields)}"
        )
    settings = {name: value for name, value in settings.items() if name in fields}
    values = config.model_dump()
    for name, value in settings.items():
        values[name] = value
        if isinstance(value, str) and value[:1] in ("[", "{"):  # lists and objects come from the command line as JSON
            with contextlib.suppress(ValueError):
                values[name] = json.loads(value)
    try:
        return type(config).model_validate(values)
    except ValidationError as error:
        raise SettingError(explain(error, fields)) from None
