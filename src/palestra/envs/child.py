"""Runs untrusted code for `child_process.py`: reads an environment's config, or scores answers of reasoning-gym.

Requests come on stdin as lines with a number, the name of a function and its arguments as a Python literal; replies go
to stdout as JSON lines. Whatever a request makes this process do, it can be killed, and nothing that it sends back is
executed. Imports nothing of Palestra.
"""

import ast
import importlib
import importlib.util
import json
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SCORING_MEMORY_BYTES = 3 * 2**30
SCORING_CPU_S = 10  # per answer; also ends a process whose parent is gone
REFUSED = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn", "socket.",
           "ctypes.", "shutil.", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.kill",
           "os.link", "os.symlink", "os.truncate")  # fmt: skip
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


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


class Scorer:
    """The scorers of reasoning-gym, some of which evaluate an answer as Python."""

    def __init__(self) -> None:
        self.library: Any = importlib.import_module("reasoning_gym")
        self.datasets: dict[str, Any] = {}
        resource.setrlimit(resource.RLIMIT_AS, (SCORING_MEMORY_BYTES, SCORING_MEMORY_BYTES))
        sys.addaudithook(refuse_harm)

    def score(self, task: str, settings: dict[str, Any], answer: str, entry: Any) -> float:
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + SCORING_CPU_S + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        key = repr((task, settings))
        if key not in self.datasets:
            self.datasets[key] = self.library.create_dataset(task, **settings)
        return float(self.datasets[key].score_answer(answer, entry))


def refuse_harm(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: no programs, no network, no writing. It stops what a model tries, not a determined attacker."""
    if event.startswith(REFUSED):
        raise PermissionError(f"{event} is refused while an answer is scored")
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITES:
        raise PermissionError("writing files is refused while an answer is scored")


def reason(error: BaseException) -> str:
    if type(error).__name__ == "ValidationError" and hasattr(error, "errors"):
        return "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
    return f"{type(error).__name__}: {error}"


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the code prints is no reply
    requests, sys.stdin = sys.stdin.buffer, None
    functions: dict[str, Any] = {"describe": describe}
    for line in requests:
        number, function, arguments = line.decode().split(" ", 2)
        try:
            if function == "score" and function not in functions:
                functions["score"] = Scorer().score
            reply = {"number": int(number), "value": functions[function](**ast.literal_eval(arguments))}
        except BaseException as error:  # the code may ask to exit
            reply = {"number": int(number), "error": reason(error)[:2000]}
        replies.write(json.dumps(reply, default=str) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
