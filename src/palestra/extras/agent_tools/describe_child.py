"""Reads an environment's config in a process of its own; see envs/child.py. Imports nothing of Palestra."""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def describe(
    file: str, class_name: str, settings: dict[str, Any], package: str = "", roots: Sequence[str] = ()
) -> dict[str, Any]:
    """The fields of an environment's config with its own values, and the run settings that suit it."""
    sys.path += roots
    cls = getattr(import_file(Path(file), package), class_name)
    config = cls.config_init()
    if isinstance(config, tuple):  # Atropos gives (config, servers)
        config = config[0]
    if settings:
        config = type(config).model_validate({**config.model_dump(), **settings})
    values, schema = config.model_dump(mode="json"), type(config).model_json_schema()
    shared = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    fields = [
        {
            "name": name,
            "type": info.annotation.__name__ if isinstance(info.annotation, type) else str(info.annotation),
            "default": values[name],
            "description": info.description or "",
            "schema": {**schema["properties"].get(info.alias or name, {}), **shared},
        }
        for name, info in type(config).model_fields.items()
    ]
    return {"fields": fields, "run_settings": dict(getattr(cls, "run_settings", {}))}


def import_file(path: Path, package: str = "") -> Any:
    name = f"{package}.{path.stem}" if package else f"palestra_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module
