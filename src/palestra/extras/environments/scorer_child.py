"""Scores answers of reasoning-gym in a process of its own; see envs/child.py. Imports nothing of Palestra."""

import importlib
import os
import resource
import sys
from functools import cache
from typing import Any

SCORING_MEMORY_BYTES = 3 * 2**30
SCORING_CPU_S = 10  # per answer; also ends a process whose parent is gone
REFUSED = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn", "socket.",
           "ctypes.", "shutil.", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.kill",
           "os.link", "os.symlink", "os.truncate")  # fmt: skip
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def score(**question: Any) -> float:
    return _scorer().score(**question)


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


@cache
def _scorer() -> Scorer:
    """The library is imported with the first answer."""
    return Scorer()
