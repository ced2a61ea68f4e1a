"""What reads an environment's config in a process of its own. It needs nothing of Palestra but what the file imports.

Asked on stdin: {"file", "class_name", "settings"}. Answered on stdout: {"fields", "run_settings"} or {"error"}.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any


def describe(file: str, class_name: str, settings: dict[str, Any]) -> dict[str, Any]:
    cls = getattr(_module(Path(file)), class_name)
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


def _module(path: Path) -> Any:
    name = f"palestra_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def _reason(error: BaseException) -> str:
    if type(error).__name__ == "ValidationError" and hasattr(error, "errors"):
        return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
    return f"{type(error).__name__}: {error}"


def main() -> None:
    """Only the answer goes to stdout, whatever the environment prints."""
    answer, sys.stdout = sys.stdout, sys.stderr
    try:
        description = describe(**json.load(sys.stdin))
    except (Exception, SystemExit) as error:
        description = {"error": _reason(error)}
    json.dump(description, answer, default=str)
    answer.flush()


if __name__ == "__main__":
    main()
