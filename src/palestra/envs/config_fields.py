"""An environment's config fields, with its own values: read in a process that has none of our secrets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from palestra.core.errors import PalestraError
from palestra.envs.discover import Found

_KEPT = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")


def config_fields(found: Found, timeout_s: float = 30.0) -> list[dict[str, Any]]:
    """The fields of `config_init()`: name, type, default (the environment's own) and description."""
    arguments = [sys.executable, "-m", __name__, str(found.file_path), found.class_name]
    with tempfile.TemporaryDirectory() as home:
        clean = {key: os.environ[key] for key in _KEPT if key in os.environ} | {"HOME": home}
        process = subprocess.Popen(
            arguments,
            env=clean,
            cwd=home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            answer, complaints = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
            process.wait()
            raise PalestraError(f"reading the config of {found.name} took longer than {timeout_s:g} s") from None
    if process.returncode:
        lines = complaints.strip().splitlines()
        raise PalestraError(f"the config of {found.name} cannot be read: {lines[-1] if lines else process.returncode}")
    fields: list[dict[str, Any]] = json.loads(answer)
    for row in fields:
        row["default"] = found.preset.get(row["name"], row["default"])
    return fields


def _describe(config: Any) -> list[dict[str, Any]]:
    values = config.model_dump(mode="json")
    return [
        {
            "name": name,
            "type": info.annotation.__name__ if isinstance(info.annotation, type) else str(info.annotation),
            "default": values[name],
            "description": info.description or "",
        }
        for name, info in type(config).model_fields.items()
    ]


def _main(file: str, class_name: str) -> None:
    """What runs in the other process: only the answer goes to stdout, whatever the environment prints."""
    answer, sys.stdout = sys.stdout, sys.stderr
    from palestra.core.import_file import import_file

    cls = getattr(import_file(Path(file), file, ""), class_name)
    config = cls.config_init()
    if isinstance(config, tuple):  # Atropos gives (config, servers)
        config = config[0]
    json.dump(_describe(config), answer)


if __name__ == "__main__":
    try:
        _main(*sys.argv[1:])
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
