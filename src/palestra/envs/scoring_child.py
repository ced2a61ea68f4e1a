"""`python scoring_child.py`: scores answers with reasoning-gym, whose scorers may evaluate them as Python.

Requests come on stdin as pickles (of our own making), answers go to stdout as JSON lines: whatever an answer makes
this process do, it can be ended, and nothing that it sends back is run.
"""

import importlib
import json
import os
import pickle
import resource
import sys
from typing import Any

_MEMORY_BYTES = 3 * 2**30
_CPU_S = 10  # a request; also ends a process whose parent is gone
_REFUSED = ("os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "subprocess.Popen", "pty.spawn", "socket.",
            "ctypes.", "shutil.", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.kill",
            "os.link", "os.symlink", "os.truncate")  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def refuse_harm(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook: no programs, no network, no writing. It stops what a model tries, not a determined attacker."""
    if event.startswith(_REFUSED):
        raise PermissionError(f"{event} is refused while an answer is scored")
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES:
        raise PermissionError("writing files is refused while an answer is scored")


def main() -> None:
    library: Any = importlib.import_module("reasoning_gym")
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what scorers print is no reply
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    datasets: dict[str, Any] = {}
    sys.addaudithook(refuse_harm)
    requests = sys.stdin.buffer
    sys.stdin = None
    while True:
        try:
            number, task, settings, answer, entry = pickle.load(requests)
        except EOFError:
            return
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime) + _CPU_S + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        try:
            key = repr((task, settings))
            if key not in datasets:
                datasets[key] = library.create_dataset(task, **settings)
            reply = {"number": number, "value": float(datasets[key].score_answer(answer, entry))}
        except BaseException as error:  # an answer may ask to exit
            reply = {"number": number, "error": f"{type(error).__name__}: {error}"[:300]}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
